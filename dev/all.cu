// Every ladder in one program, so that the kernels of train_unet.cu are compiled once for all of them: the
// tests build this. ./ladders gelu [version|all] [case]; dev/Makefile builds a ladder alone.
#define ALL_LADDERS
#define PROGRAM
#include "adamw.cu"
#include "attention.cu"
#include "attention_block.cu"
#include "conv1x1.cu"
#include "conv3x3.cu"
#include "elementwise.cu"
#include "gelu.cu"
#include "groupnorm.cu"
#include "linear.cu"
#include "resblock.cu"

static const Ladder* const LADDERS[] = {
    &conv3x3_ladder,     &conv1x1_ladder, &groupnorm_ladder, &attention_ladder, &linear_ladder,
    &elementwise_ladder, &gelu_ladder,    &adamw_ladder,     &resblock_ladder,  &attention_block_ladder};

static int run_a_ladder(int argc, char** argv) {
    for (const Ladder* ladder : LADDERS)
        if (argc > 1 && !strcmp(argv[1], ladder->stem)) return run_ladder(*ladder, argc - 1, argv + 1);
    std::string names;
    for (const Ladder* ladder : LADDERS) names += std::string(" ") + ladder->stem;
    fail_usage("usage: ./ladders LADDER [version|all] [case], with one of:%s", names.c_str());
}

int main(int argc, char** argv) {
    return guarded([&] { return run_a_ladder(argc, argv); });
}
