// harness.h: what network.cu and readers.cu share: small networks, their weights and batches, refusals. Each includes
// it behind the program.
#pragma once

static std::string running = "start";  // the group of tests under way, for the last words of a crash

// What a signal does that ends the program.
static void last_words(int signal_number) {
    const char* what = "crashed";
    if (signal_number == SIGALRM) what = "hangs";
    if (signal_number == SIGABRT) what = "stopped by an assertion (see above)";
    report(false, running, "%s", what);
    summary();
    _exit(1);
}

static double largest_of(const std::vector<double>& r) {
    double largest = 0;
    for (double value : r) largest = std::max(largest, fabs(value));
    return largest;
}

// Takes one optimiser step. A loss or gradient that is not finite leaves the weights and the step as they were.
static StepState train_step(Trainer* t) {
    begin_next_step(t);
    return await_step(t);
}

static bool same_bits(const void* a, const void* b, size_t bytes) { return memcmp(a, b, bytes) == 0; }

// Returns the sentence with which `act` is refused, or "" if it is not. To run out of memory is no sentence, and is
// marked by "!!".
static std::string refusal(const std::function<void()>& act) {
    try {
        return failure_of(act);
    } catch (std::bad_alloc&) {
        return "!! ran out of memory";
    }
}

// Whether a message is one sentence: one line of printable text that does not start a second sentence.
static bool is_sentence(const std::string& message) {
    if (message.size() < 12 || message.size() > 1500 || message[0] == '!') return false;
    for (size_t i = 0; i < message.size(); i++) {
        if ((unsigned char)message[i] < ' ' || message[i] == 127) return false;

        bool ends_here = message[i] == '.' && i + 2 < message.size() && message[i + 1] == ' ';
        if (ends_here && isupper(message[i + 2])) return false;
    }
    return true;
}

// A small generator for the tests' own choices.
struct Dice {
    uint32_t seed, count = 0;
    uint32_t next() { return philox(seed, 1000, count++, 0, 0).word[0]; }
    uint32_t below(uint32_t n) { return (uint32_t)(((uint64_t)next() * n) >> 32); }
    bool one_in(uint32_t n) { return below(n) == 0; }

    float normal() {
        float four[4];
        random_normals(four, seed, 1001, count++, 0, 0);
        return four[0];
    }
};

static std::vector<float> normals_of(uint32_t seed, size_t n) {
    std::vector<float> values((n + 3) / 4 * 4);  // four are made at a time
    for (size_t quad = 0; quad < values.size() / 4; quad++)
        random_normals(&values[4 * quad], seed, 1002, (uint32_t)quad, 0, 0);
    values.resize(n);
    return values;
}

typedef std::vector<std::pair<std::string, std::string>> Flags;

static Config config_of(const Flags& flags) {
    Config config = default_config();
    for (auto& [name, value] : flags) set_flag(&config, flag_named(name), value);
    return config;
}

// A network that runs in milliseconds and still has every kind of block.
static Flags toy_flags() {
    return {{"image_size", "8"},
            {"num_channels", "32"},
            {"channel_mult", "1,2"},
            {"num_res_blocks", "1"},
            {"attention_resolutions", "4"},
            {"num_head_channels", "16"},
            {"norm_groups", "8"},
            {"batch_size", "2"}};
}

static Flags with(Flags flags, const Flags& more) {
    flags.insert(flags.end(), more.begin(), more.end());
    return flags;
}

static void build_model(Model* m, const Config& config, int batch, bool training) {
    *m = plan_model(config, batch, training);
    check_memory(*m);
    allocate_model(m);
}

// Initialises the weights, and adds N(0, 0.02^2) to every parameter: without it nearly every gradient is exactly zero.
static void perturbed_weights(Model* m, uint32_t seed) {
    initialise_weights(m, seed);
    for (const Parameter& t : m->plan.tensors) {
        std::vector<float> noise = reordered(normals_of(seed + 77 + (uint32_t)t.offset, t.count), t, true);
        std::vector<float> weights(t.size);
        backend_download(weights.data(), m->master + t.offset, t.size * sizeof(float));
        for (size_t i = 0; i < t.size; i++) weights[i] += 0.02f * noise[i];
        backend_upload(m->master + t.offset, weights.data(), t.size * sizeof(float));
    }
}

// Returns (pixels, PIXEL): normals, and zeros behind the channels.
static std::vector<float> random_pixels(uint32_t seed, size_t pixels, int channels) {
    std::vector<float> values = normals_of(seed, pixels * PIXEL);
    for (size_t i = 0; i < values.size(); i++)
        if ((int)(i % PIXEL) >= channels) values[i] = 0;
    return values;
}

// Gives the model B random images, with their targets and timesteps.
static void random_batch(Model* m, int B, uint32_t seed) {
    size_t pixels = (size_t)B * m->config.image_size * m->config.image_size;
    size_t n = pixels * PIXEL;
    std::vector<float> input = random_pixels(seed, pixels, m->config.in_channels);
    std::vector<float> target = random_pixels(seed + 1, pixels, m->config.in_channels);
    std::vector<int> timesteps(B);
    for (int b = 0; b < B; b++) timesteps[b] = (int)random_below(1000, seed, STREAM_TIMESTEP, 0, b, 0);

    backend_upload(m->input, input.data(), n * sizeof(float));
    backend_upload(m->target, target.data(), n * sizeof(float));
    backend_upload(m->timesteps, timesteps.data(), B * sizeof(int));
}

static std::vector<float> downloaded(const float* from, size_t n) {
    std::vector<float> values(n);
    backend_download(values.data(), from, n * sizeof(float));
    return values;
}

// Returns the mean loss of the first B images. If the model is trained, the gradient of its output is left behind.
static double forward_loss(Model* m, int B) {
    BatchLoss batch = batch_loss(m, OBJECTIVE_IMAGES);
    batch.batch_size = batch.B = B;
    floatX* dout = output_gradient_of(m, m->plan.blocks.back(), B).data;
    const float* images = m->variance_losses ? m->images : nullptr;

    unet_forward(m, call_of(m, B));
    run(PredictionLoss<floatX>{batch, unet_output(m), m->target, dout, images});

    double loss = 0;
    for (const float* losses : {m->losses, m->variance_losses}) {
        if (!losses) continue;
        std::vector<float> parts = downloaded(losses, (size_t)B * loss_chunks(batch.pixels));
        loss += std::accumulate(parts.begin(), parts.end(), 0.0) / batch.elements();
    }
    return loss;
}

static std::vector<float> gradients_of(const Model* m) {
    return downloaded(m->gradients, m->plan.num_floats);
}

static std::vector<float> output_values(const Model* m, int B) {
    return downloaded(unet_output(m), (size_t)B * PIXEL * m->config.image_size * m->config.image_size);
}

// Makes the memory of every layer NaN, as if nobody had ever written there: bytes of 255 are NaN in any float type.
static void poison(Model* m) {
    memset(m->arena, 255, m->plan.arena_bytes);
    if (cpu::cpu_workspace) memset(cpu::cpu_workspace, 255, cpu::cpu_workspace_bytes());
}

enum { TEST_THREADS = 4 };

static void set_threads(int threads) { cpu::used_threads = threads; }

// Every test program begins with this.
static void begin_tests() {
    for (int signal_number : {SIGABRT, SIGALRM}) signal(signal_number, last_words);
#ifndef __SANITIZE_ADDRESS__  // which reports crashes itself, and better
    for (int signal_number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) signal(signal_number, last_words);
#endif
    set_threads(TEST_THREADS);
    // It is large enough for as many threads as a test may set.
    cpu::cpu_workspace = (float*)backend_allocate(cpu::cpu_workspace_bytes());
}
