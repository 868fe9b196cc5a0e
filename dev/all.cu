// Every ladder in one program, so that the kernels of train_unet.cu are compiled once for all of them: the
// tests build this. ./ladders silu [version|all] [case]; a ladder alone is its own program.
#define ALL_LADDERS
#include "silu.cu"

static const Ladder* const LADDERS[] = {&silu_ladder};

int main(int argc, char** argv) {
    for (const Ladder* ladder : LADDERS)
        if (argc > 1 && !strcmp(argv[1], ladder->stem)) return run_ladder(*ladder, argc - 1, argv + 1);
    std::string names;
    for (const Ladder* ladder : LADDERS) names += std::string(" ") + ladder->stem;
    fail_usage("usage: ./ladders LADDER [version|all] [case], with one of:%s", names.c_str());
}
