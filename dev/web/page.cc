// page.cc: the network of train_unet.cu as a WebAssembly module, with which page.html draws pictures in a browser.
//
// It is train_unet.cu without files, ranks, training and command line; dev/web/Makefile builds it, and page.wasm is what
// that built. One instance draws a batch of pictures in one thread, and the page has several instances. The page calls
//   configure    with settings, a line each: NAME = VALUE, as in --config files
//   load         with the weights, once
//   requests     for the place where it writes what is to be drawn
//   start        to begin with noise
//   step         until no step is left; after each of them pixels() holds the pictures
// What configure and load read lies in memory of allocate. A call that fails ends in the page's function fail, with a
// sentence, and the instance must not be used again.
#define NETWORK_ONLY
#include "../../train_unet.cu"

#include <typeinfo>

#define EXPORT(name) extern "C" [[clang::export_name(#name)]]

// ---- errors -----------------------------------------------------------------------------------------------
extern "C" [[noreturn, clang::import_module("page"), clang::import_name("fail")]] void page_fail(const char* sentence,
                                                                                              size_t bytes);

// WebAssembly's own exceptions are newer than some browsers: what is thrown here becomes an exception of the page's.
extern "C" void* __cxa_allocate_exception(size_t bytes) { return malloc(bytes); }
extern "C" [[noreturn]] void __cxa_throw(void* thrown, std::type_info* type, void (*)(void*)) {
    std::string sentence = text("%s", type->name());
    if (*type == typeid(Failure)) sentence = ((Failure*)thrown)->sentence;
    page_fail(sentence.data(), sentence.size());
}

// ---- the model --------------------------------------------------------------------------------------------
static Model model;
static Config& config = model.config = default_config();

static size_t picture_size() { return (size_t)config.image_size * config.image_size * PIXEL; }

template <typename T> static T* allocate_zeros(size_t count) {
    void* memory = backend_allocate(count * sizeof(T));
    backend_zero(memory, count * sizeof(T));
    return (T*)memory;
}

EXPORT(allocate) void* allocate_bytes(size_t bytes) { return backend_allocate(bytes); }
EXPORT(release) void release_bytes(void* memory) { backend_free(memory); }

// Settings come over those before them.
EXPORT(configure) void configure(const char* lines, size_t bytes) {
    for (const std::string& line : split(std::string(lines, bytes), '\n')) {
        size_t mark = line.find('=');
        if (mark == line.npos) continue;
        set_flag(&config, flag_named(trimmed(line.substr(0, mark))), trimmed(line.substr(mark + 1)));
    }
    check_config(config);
}

// The weights of a page: see docs/formats.md.
struct PackedWeights {
    const uint8_t* at;

    float take_bf16() {
        uint32_t bits = (uint32_t)(at[0] | at[1] << 8) << 16;
        at += 2;
        return std::bit_cast<float>(bits);
    }
    int take_int8() { return (int8_t)*at++; }

    // Convolutions are int8 behind a scale for each output; everything else is bf16, and so are the scales.
    static bool is_int8(const Parameter& t) { return t.shape.size() > 2; }
    static size_t bytes_of(const Parameter& t) { return is_int8(t) ? 2 * t.shape[0] + t.count : 2 * t.count; }

    std::vector<float> unpack(const Parameter& t) {
        std::vector<float> scales(is_int8(t) ? t.shape[0] : 0), values(t.count);
        for (float& scale : scales) scale = take_bf16();
        for (size_t i = 0; i < t.count; i++)
            values[i] = is_int8(t) ? scales[i / (t.count / t.shape[0])] * (float)take_int8() : take_bf16();
        return values;
    }
};

// Plans the network, for as many rows at a time, and unpacks its weights.
EXPORT(load) void load(const uint8_t* weights, size_t bytes, uint32_t checksum, int rows) {
    model.plan = make_plan(config, rows, false);
    size_t expected = 0;
    for (const Parameter& t : model.plan.tensors) expected += PackedWeights::bytes_of(t);
    if (bytes != expected)
        fail("its weights are damaged: they have %zu bytes, and its network needs %zu", bytes, expected);
    if (crc32(weights, bytes) != checksum) fail("its weights are damaged: their checksum does not match");

    model.weights = model.fp32_params = allocate_zeros<float>(model.plan.num_floats);
    PackedWeights packed = {weights};
    for (const Parameter& t : model.plan.tensors) {
        std::vector<float> values = packed.unpack(t);
        if (!all_finite(values.data(), values.size()))
            fail("its weights hold NaN or infinity in %s", t.name.c_str());
        std::ranges::copy(reordered(values, t, true), model.weights + t.offset);
    }

    size_t values = rows * picture_size();
    allocate_workspace();
    model.arena = allocate_zeros<char>(model.plan.arena_bytes);
    model.input = allocate_zeros<float>(values);
    model.sampler = {.specs = allocate_zeros<SampleSpec>(rows),
                     .x = allocate_zeros<float>(values),
                     .saved = allocate_zeros<float>(values)};
    model.timesteps = allocate_zeros<int>(rows);
    if (label_rows(config)) model.labels = allocate_zeros<int>(rows);
}

// ---- drawing ----------------------------------------------------------------------------------------------
// A picture comes from the noise of a seed, or from what lies on the way from there to another seed's: 0 to 1.
struct Request {
    uint32_t seed, other_seed;
    float part;
    int label;
};
static std::vector<Request> wanted;
static std::vector<SamplerStep> steps;
static size_t taken;  // of them
static CallGraphs graphs;
static std::vector<uint8_t> shown;  // (B, H, W, 4): RGBA

// value(at) in [-1, 1] of each element (B, H, W, PIXEL), as the page shows it; of 2 or 4 channels the last is alpha.
static void show(auto value) {
    const int C = config.in_channels, colours = C - (C % 2 == 0);
    for (size_t pixel = 0; pixel < shown.size() / 4; pixel++) {
        uint8_t* rgba = &shown[4 * pixel];
        for (int c = 0; c < 3; c++) rgba[c] = byte_of(value(pixel * PIXEL + (colours == 1 ? 0 : c)));
        rgba[3] = colours < C ? byte_of(value(pixel * PIXEL + C - 1)) : 255;
    }
}

// The next step, of which the first calls no network. Shows x, or what the network takes the finished picture for.
static void take_step(bool shows_x0) {
    SampleBatch<float> batch = samples_of(&model, (int)wanted.size(), config.guidance_scale);
    const SamplerStep& step = steps[taken++];
    predict_samples(&model, batch, step, &graphs);
    if (shows_x0) show([&](size_t at) { return batch.predicted_x0(step, at); });
    run(UpdateSamples<float>{batch, step});
    if (!shows_x0) show([&](size_t at) { return batch.x[at]; });
}

// x becomes the noise of each picture's seed.
static void begin_with_noise(uint32_t Request::*seed) {
    for (size_t i = 0; i < wanted.size(); i++) model.sampler.specs[i] = {wanted[i].*seed, wanted[i].label};
    begin_samples(&model, samples_of(&model, (int)wanted.size(), config.guidance_scale));
    taken = 0;
    take_step(false);
}

// Turns x, n numbers, by a part of the angle towards y (Shoemake 1985): generate.py's slerp.
static void turn(float* x, const float* y, size_t n, double part) {
    double xx = std::inner_product(x, x + n, x, 0.0), yy = std::inner_product(y, y + n, y, 0.0);
    double angle = acos(std::inner_product(x, x + n, y, 0.0) / sqrt(xx * yy));
    for (size_t i = 0; i < n; i++) x[i] = (float)((sin((1 - part) * angle) * x[i] + sin(part * angle) * y[i]) / sin(angle));
}

EXPORT(requests) Request* requests(int count) {
    wanted.assign(count, {});
    return wanted.data();
}

// Begins the pictures of requests(); returns how many steps follow.
EXPORT(start) int start() {
    if (wanted.size() * (is_guided(config) ? 2 : 1) > (size_t)model.plan.batch) fail("too many pictures at a time");
    steps = make_sampler(config);
    size_t size = picture_size(), values = wanted.size() * size;
    shown.assign(values / PIXEL * 4, 0);

    begin_with_noise(&Request::other_seed);
    std::vector<float> others(model.sampler.x, model.sampler.x + values);
    begin_with_noise(&Request::seed);
    for (size_t i = 0; i < wanted.size(); i++)
        if (wanted[i].part > 0 && wanted[i].seed != wanted[i].other_seed)
            turn(model.sampler.x + i * size, &others[i * size], size, wanted[i].part);
    for (int answer = 0; answer < 1 + is_guided(config); answer++)
        std::copy_n(model.sampler.x, values, model.input + answer * values);
    return (int)steps.size() - 1;
}

// Takes a step; returns how many are left.
EXPORT(step) int step(int shows_x0) {
    take_step(shows_x0);
    return (int)(steps.size() - taken);
}

// The pictures of the last step, (B, H, W, 4), RGBA.
EXPORT(pixels) const uint8_t* pixels() { return shown.data(); }
EXPORT(pixel_bytes) size_t pixel_bytes() { return shown.size(); }
