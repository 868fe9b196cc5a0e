// readers.cu: tests of what reads files: images, weights, checkpoints and configurations that are truncated, damaged
// or made up. Each is read as it should be, or refused with one sentence, and takes no more memory than it may. It
// includes the program, so that what is tested is what runs.
//
//   build/readers                        crafted files, and 2,000 random mutations
//   build/readers --fuzz N [--seed S]    with N random mutations
//
// Each test prints one line, `ok NAME detail` or `FAIL NAME detail`. The last line counts them, and the exit status
// is 1 where one failed.

#include <cfloat>
#include <climits>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include <dirent.h>
#include <fcntl.h>
#include <malloc.h>
#include <sys/stat.h>
#include <unistd.h>

// ---- allocations are counted, so that a file's header can be shown to claim no memory ---------------------

static std::atomic<size_t> live_bytes, peak_bytes, largest_request;
static size_t allocation_limit = SIZE_MAX;  // a larger request is refused

static void raise_to(std::atomic<size_t>* most, size_t value) {
    size_t seen = *most;
    while (value > seen && !most->compare_exchange_weak(seen, value)) {
    }
}

__attribute__((noinline)) static void count_allocation(void* memory, size_t requested) {
    size_t live = live_bytes += malloc_usable_size(memory);
    raise_to(&peak_bytes, live);
    raise_to(&largest_request, requested);
}

__attribute__((noinline)) static void* counted_malloc(size_t bytes) {
    if (bytes > allocation_limit) {
        largest_request = bytes;
        return nullptr;
    }
    void* memory = malloc(bytes ? bytes : 1);
    if (memory) count_allocation(memory, bytes);
    return memory;
}

__attribute__((noinline)) static void counted_free(void* memory) {
    if (memory) live_bytes -= malloc_usable_size(memory);
    free(memory);
}

void* operator new(size_t bytes) {
    void* memory = counted_malloc(bytes);
    if (!memory) throw std::bad_alloc();
    return memory;
}

void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return counted_malloc(bytes); }
void operator delete(void* memory) noexcept { counted_free(memory); }
void operator delete(void* memory, size_t) noexcept { counted_free(memory); }

#define malloc counted_malloc
#define free counted_free

#pragma GCC diagnostic ignored "-Wunused-function"  // main's own helpers have no caller here
#define TESTING
#include "../train_unet.cu"

#include "cases.h"
#include "harness.h"

// The smallest network that the flags allow: its files are read thousands of times.
static Flags smallest_flags() {
    return {{"image_size", "4"},
            {"num_channels", "32"},
            {"channel_mult", "1"},
            {"num_res_blocks", "1"},
            {"attention_resolutions", "0"},
            {"norm_groups", "8"},
            {"num_head_channels", "8"},
            {"batch_size", "3"}};
}

enum FileKind { NEW_IMAGES, LABELLED_IMAGES, OLD_IMAGES, WEIGHTS, CHECKPOINT, FILE_KINDS };
static const char* const KIND_NAMES[] = {"images", "labelled images", "old images", "weights", "checkpoint"};

// A valid file on the disk that is changed in place, read, and mended.
struct Victim {
    FileKind kind;
    std::string path;
    int image_size;  // asked for when reading images; 0: theirs
    int fd;
    size_t size;
    std::vector<char> content;  // as it is while nothing is changed
    Section settings;           // of weights, the section config
    uint32_t data_checksum;     // of what lies behind the header

    // The field of the header that holds a checksum of the whole file, -1 where the format has none.
    int checksum_field() const {
        switch (kind) {
            case NEW_IMAGES:
            case LABELLED_IMAGES: return IMAGES_CHECKSUM_FIELD;
            case WEIGHTS:
            case CHECKPOINT: return FIELD_CHECKSUM;
            default: return -1;
        }
    }
};

static std::string test_folder;

// What `act` prints on stderr.
static std::string stderr_of(const std::function<void()>& act) {
    std::string path = test_folder + "/stderr";
    fflush(stderr);
    int kept = dup(2);
    int file = open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0666);
    assert(kept >= 0 && file >= 0);
    dup2(file, 2);
    close(file);

    act();

    fflush(stderr);
    dup2(kept, 2);
    close(kept);
    return read_text(path);
}

static size_t files_in(const std::string& folder) {
    size_t count = 0;
    DIR* dir = opendir(folder.c_str());
    while (dir && readdir(dir)) count++;
    if (dir) closedir(dir);
    return count;
}

// Writes the content and makes the file `size` bytes long.
static void write_whole(const std::string& path, const std::vector<char>& content, size_t size) {
    FILE* f = fopen(path.c_str(), "wb");
    assert(f && fwrite(content.data(), 1, content.size(), f) == content.size());
    assert(fflush(f) == 0 && ftruncate(fileno(f), (off_t)size) == 0);
    fclose(f);
}

static void write_whole(const std::string& path, const std::string& content) {
    write_whole(path, std::vector<char>(content.begin(), content.end()), content.size());
}

// Puts the right checksum into the header: that of the data, then of the header with a 0 in the checksum's place.
static void seal(std::vector<char>* content, int checksum_field) {
    int32_t header[HEADER_INTS];
    memcpy(header, content->data(), sizeof header);
    header[checksum_field] = 0;
    uint32_t crc = crc32(content->data() + HEADER_BYTES, content->size() - HEADER_BYTES);
    header[checksum_field] = (int32_t)crc32(header, sizeof header, crc);
    memcpy(content->data(), header, sizeof header);
}

// The old format has floats behind [magic, N, C, H, W]. The new has bytes behind
// [magic, N, C, H, W, version, type, classes, bytes of names, checksum]: see docs/formats.md.
static std::vector<char> image_file(int N, int size, bool old, bool labels) {
    int32_t header[HEADER_INTS] = {IMAGES_MAGIC, N, 3, size, size};
    size_t pixels = (size_t)N * 3 * size * size;
    std::vector<char> content(HEADER_BYTES);
    if (old) {
        std::vector<float> values(pixels);
        for (size_t i = 0; i < pixels; i++)
            values[i] = (float)(random_word(1, 1004, i, 0, 0) >> 8) * 0x1p-23f - 1;
        content.insert(content.end(), (char*)values.data(), (char*)(values.data() + pixels));
        memcpy(content.data(), header, sizeof header);
        return content;
    }

    for (size_t i = 0; i < pixels; i++) content.push_back((char)(random_word(1, 1004, i, 0, 0) >> 24));
    header[5] = 1;
    header[6] = 1;
    if (labels) {
        for (int32_t i = 0; i < N; i++) {
            int32_t label = i % 2;
            content.insert(content.end(), (char*)&label, (char*)(&label + 1));
        }
        std::string names = "cat\ndog\n";
        content.insert(content.end(), names.begin(), names.end());
        header[7] = 2;
        header[8] = (int32_t)names.size();
    }
    memcpy(content.data(), header, sizeof header);
    seal(&content, IMAGES_CHECKSUM_FIELD);
    return content;
}

// The smallest network, with many settings that are not the default.
static Config smallest_config() {
    Config config = config_of(smallest_flags());
    strcpy(config.data_file, "some/images.bin");
    config.seed = 4000000000u;
    config.predict = PREDICT_V;
    config.flip = 1;
    config.noise_schedule = SCHEDULE_COSINE;
    config.use_ema = 2;
    config.hyper.lr = 0.00123f;
    config.hyper.lr_schedule = LR_LINEAR;
    config.hyper.lr_steps = 123;
    config.hyper.warmup_steps = 7;
    config.hyper.final_lr_fraction = 0.1f;
    config.hyper.ema_rate[1] = 0.9999f;
    config.hyper.grad_clip = 1.5f;
    config.hyper.skip_outliers = 6;
    return config;
}

// After 40 steps of which 3 were skipped.
static History some_history() {
    History history = {3, 37, {}, {}};
    for (int i = 0; i < 37; i++) {
        history.losses[i] = 1 / (1.0f + i);
        history.norms[i] = 0.5f + i;
    }
    return history;
}

// A file of every kind: checkpoints by the program's own writer, the others by hand.
static Victim make_victim(FileKind kind, int image_size = 0) {
    Victim v = {};
    v.kind = kind;
    v.image_size = image_size;
    v.path = text("%s/victim_%d_%d.bin", test_folder.c_str(), kind, image_size);
    if (kind <= OLD_IMAGES) {
        bool old = kind == OLD_IMAGES;
        v.content = image_file(old ? 9 : 33, 8, old, kind == LABELLED_IMAGES);
        write_whole(v.path, v.content, v.content.size());
    } else {
        Model m = Model();
        build_model(&m, smallest_config(), 1, kind == CHECKPOINT);
        perturbed_weights(&m, 5);
        if (kind == WEIGHTS) {
            m.ema[0] = m.ema[1] = nullptr;
        } else {
            for (size_t i = 0; i < m.plan.num_floats; i++) {
                m.adam_m[i] = (float)i;
                m.adam_v[i] = 2 * (float)i;
            }
            m.data_checksum = "0123abcd";
        }
        write_checkpoint(v.path, m, 40, 0.25f, some_history());
        std::string written = read_text(v.path);
        v.content.assign(written.begin(), written.end());
        v.settings = open_weights(v.path).sections["config"];
    }
    v.size = v.content.size();
    v.data_checksum = crc32(v.content.data() + HEADER_BYTES, v.size - HEADER_BYTES);
    v.fd = open(v.path.c_str(), O_RDWR);
    assert(v.fd >= 0);
    return v;
}

// Does work whose memory is not a reader's, and is not counted: a chain of 100,000 timesteps has that many levels.
static void uncounted(auto work) {
    size_t peak = peak_bytes, largest = largest_request, limit = allocation_limit;
    allocation_limit = SIZE_MAX;
    work();
    peak_bytes = peak;
    largest_request = largest;
    allocation_limit = limit;
}

// Bytes that the plan takes of the deepest network that a header can describe.
static size_t deepest_plan_bytes() {
    Config config = default_config();
    config.image_size = MAX_ATTENTION_SIZE;
    config.num_res_blocks = 16;
    for (int level = 0; level < MAX_LEVELS; level++) {
        config.channel_mult[level] = 1;
        config.attention_resolutions[level] = MAX_ATTENTION_SIZE >> level;
    }
    check_config(config);
    size_t before = live_bytes;
    peak_bytes = before;
    make_plan(config, 1, false);
    return peak_bytes - before;
}

// What a program does with a file of images, and what must then hold. Returns what is wrong, "" where nothing is.
static std::string use_images(const Victim& v) {
    Config config = {};
    config.image_size = v.image_size ? v.image_size : Reader(v.path).header[3];
    config.in_channels = 3;
    Dataset data = read_images(v.path, config);
    size_t elements = (size_t)3 * config.image_size * config.image_size;
    if (data.count < 1 || data.bytes.size() + data.floats.size() != data.count * elements)
        return "a set of images with wrong sizes";

    for (int index : {0, data.count - 1}) {
        for (size_t e = 0; e < elements; e++) {
            float value = data.value(index * elements + e);
            if (!(value >= -1.01f && value <= 1.01f)) return "a pixel outside [-1, 1]";
        }
    }
    return "";
}

// The same for a file of weights. read_data: every section's numbers too, not only where they lie.
static std::string use_weights_file(const Victim& v, bool read_data) {
    WeightsFile file = open_weights(v.path);
    std::string bad = refusal([&] { check_config(file.config); });
    if (!bad.empty()) return "a configuration that is refused: " + bad;

    Config stored = default_config();
    read_stored_config(&stored, stored_config(file.config));
    for (const Flag& flag : FLAGS)
        if (flag.on_resume != FORGOTTEN && flag_text(stored, flag) != flag_text(file.config, flag))
            return text("another %s when it is stored again", flag.name);

    Plan plan = make_plan(file.config, 1, false);
    if (!file.sections.contains("weights") || file.step < 0) return "no weights or a negative step";

    bool finite = true;
    uncounted([&] {
        for (const SamplerStep& s : make_sampler(file.config))
            finite = finite && std::isfinite(s.x0_from_x + s.x0_from_out + s.update.x0 + s.update.x);
    });
    if (!finite) return "a sampler that is no numbers";

    std::string written = config_text(file.config);
    std::string again = test_folder + "/config_of_file.txt";
    write_whole(again, written);
    if (config_text(given_config(read_config_file(again))) != written) return "a configuration that changes";

    for (const char* section : {"weights", "ema", "ema_2", "ema_3", "ema_4", "adam_m", "adam_v"}) {
        if (!file.sections.contains(section)) continue;
        auto [offset, bytes] = file.sections.at(section);
        if (bytes != plan.num_parameters * sizeof(float) || offset < HEADER_BYTES)
            return text("a section %s of a wrong length", section);
        if (!read_data) continue;
        std::vector<float> values(plan.num_floats);
        read_parameters(plan_model(file.config, 1, false), values.data(), file, section);
        if (!all_finite(values.data(), values.size()))
            return text("a section %s that is no numbers", section);
    }
    return "";
}

static std::string use_file(const Victim& v, bool read_data) {
    return v.kind <= OLD_IMAGES ? use_images(v) : use_weights_file(v, read_data);
}

// What came of reading some files.
struct Tally {
    long accepted = 0, refused = 0;
    double slowest = 0;      // in seconds
    size_t most_memory = 0;  // beyond twice the file's size
    std::string bad;         // the first that went wrong
};

// Reads the file as it now lies on the disk. `sealed`: its checksum is right (or it has none).
static void read_victim(const Victim& v, size_t size, bool sealed, bool read_data, const std::string& what,
                        Tally* tally) {
    // The allowance is for the plan of a network, error messages, and the buffer that a file is read through. The data
    // themselves may be held twice while they are filtered or put in order.
    static const size_t allowance = deepest_plan_bytes() + (1 << 20);
    size_t before = live_bytes;
    size_t limit = 2 * std::min(size, (size_t)64 << 20) + allowance;
    peak_bytes = before;
    largest_request = 0;
    allocation_limit = limit;
    alarm(600);  // even on the busiest machine
    double start = seconds_now();
    std::string wrong;
    std::string message = refusal([&] { wrong = use_file(v, read_data); });
    double elapsed = seconds_now() - start;
    alarm(0);
    allocation_limit = SIZE_MAX;

    size_t used = peak_bytes - before;
    size_t beyond = used > 2 * size ? used - 2 * size : 0;
    tally->slowest = std::max(tally->slowest, elapsed);
    tally->most_memory = std::max(tally->most_memory, beyond);
    if (message.empty()) tally->accepted++;
    else tally->refused++;

    if (!message.empty() && !is_sentence(message)) wrong = "says '" + message + "'";
    if (message.empty() && !sealed) wrong = "accepted though its checksum is wrong";
    if (used > limit || largest_request > limit)
        wrong = text("takes %zu bytes of memory for a file of %zu", std::max(used, (size_t)largest_request),
                     size);
    if (!wrong.empty() && tally->bad.empty())
        tally->bad = text("; %s, %s: %s", KIND_NAMES[v.kind], what.c_str(), wrong.c_str());
}

static void put(const Victim& v, size_t offset, const void* data, size_t bytes) {
    assert(pwrite(v.fd, data, bytes, (off_t)offset) == (ssize_t)bytes);
}

// The header with its checksum made right again.
static void seal_header(const Victim& v, int32_t header[HEADER_INTS], uint32_t data_checksum) {
    int field = v.checksum_field();
    if (field < 0) return;
    header[field] = 0;
    header[field] = (int32_t)crc32(header, HEADER_BYTES, data_checksum);
}

static void report_tally(const std::string& name, const Tally& t) {
    report(t.bad.empty() && t.refused > 0, name,
           "%ld refused with one sentence, %ld read; slowest %.1f ms, at most %s beyond twice the file%s",
           t.refused, t.accepted, 1e3 * t.slowest, human_bytes((double)t.most_memory).c_str(), t.bad.c_str());
}

// What was written is what is read: every flag, the step, the sections, the text.
static void test_checkpoint_read_back(const Victim& v) {
    WeightsFile file = open_weights(v.path);
    Config expected = smallest_config();
    std::string differing;
    for (const Flag& flag : FLAGS)
        if (flag.on_resume != FORGOTTEN && flag_text(file.config, flag) != flag_text(expected, flag))
            differing += std::string(" ") + flag.name;

    Model m = Model();
    build_model(&m, file.config, 1, true);
    read_parameters(m, m.master, file, "weights");
    read_parameters(m, m.adam_m, file, "adam_m");
    std::vector<float> stored = downloaded(m.master, m.plan.num_floats);
    History history = some_history();
    perturbed_weights(&m, 5);
    bool same = downloaded(m.master, m.plan.num_floats) == stored && m.adam_m[77] == 77.0f;
    same &= file.step == 40 && file.smoothed == 0.25f && file.config.hyper.lr_steps == 123;
    same &= !strcmp(file.config.data_file, "some/images.bin") && !*file.config.val_file;
    same &= same_bits(&file.history, &history, sizeof history) && file.data_checksum == "0123abcd";
    write_checkpoint(test_folder + "/again.bin", m, 40, 0.25f, history);
    report(same && differing.empty(), "checkpoint, written and read", "weights, moments and every flag%s",
           differing.c_str());
}

// The damaged newest checkpoint of a folder is passed over; other files there are no checkpoints.
static void test_newest_checkpoint(const Victim& v, const std::string& folder) {
    write_whole(checkpoint_path(folder, 40), v.content, v.size);
    std::vector<char> damaged = v.content;
    damaged[damaged.size() / 2] ^= 1;
    write_whole(checkpoint_path(folder, 50), damaged, v.size);
    write_whole(checkpoint_path(folder, 60), v.content, v.size - 4096);
    write_whole(checkpoint_path(folder, 70) + ".tmp", v.content, v.size);
    write_whole(folder + "/metrics.jsonl", {0}, 1);

    std::vector<long> steps = list_checkpoints(folder);
    bool ok = steps == std::vector<long>({60, 50, 40});
    std::string message;
    std::string notes = stderr_of(
        [&] { message = refusal([&] { ok &= newest_checkpoint(folder, "").step == 40; }); });
    for (long step : {50, 60}) ok &= notes.find(checkpoint_path(folder, step)) != std::string::npos;

    unlink(checkpoint_path(folder, 40).c_str());
    std::string none;
    stderr_of([&] { none = refusal([&] { newest_checkpoint(folder, "start anew"); }); });
    report(ok && message.empty() && is_sentence(none), "newest whole checkpoint",
           "two damaged ones are named and passed over; alone they are refused");
}

// A run that resumes after step 10 drops the lines of later steps, which will be done again, and one that was cut
// short.
static void test_metrics_on_resume(const std::string& folder) {
    std::string kept =
        "{\"step\": 1, \"loss\": 0.5}\n{\"step\": 4, \"val_loss\": 0.5}\n{\"step\": 8, \"val_loss\": 0.25}\n"
        "{\"step\": 10, \"val_loss\": nan}\n{\"step\": 10, \"loss\": 0.25}\n";
    std::string dropped =
        "rubbish\n{\"step\": 11, \"loss\": 0.1}\n{\"step\": 12, \"val_loss\": 0.1}\n{\"step\": 2, \"lo";
    std::string path = folder + "/metrics.jsonl";
    write_whole(path, kept + dropped);

    std::map<long, double> validated;
    {
        Metrics log;  // closed where it leaves its scope
        log.open(path, read_text(path), 10, &validated);
        log.add("{\"step\": 11, \"loss\": 0.2}\n");
    }
    std::string found = read_text(path);
    bool losses =
        validated.size() == 3 && validated[4] == 0.5 && validated[8] == 0.25 && std::isnan(validated[10]);
    report(losses && found == kept + "{\"step\": 11, \"loss\": 0.2}\n", "metrics on resume",
           "%zu bytes kept, validation losses known", found.size());
}

static void test_valid_files(const std::vector<Victim>& victims) {
    int good = 0;
    std::string bad;
    for (const Victim& v : victims) {
        std::string wrong;
        std::string message = refusal([&] { wrong = use_file(v, true); });
        if (message.empty() && wrong.empty()) good++;
        else bad += text("; %s: %s%s", KIND_NAMES[v.kind], message.c_str(), wrong.c_str());
    }
    report(bad.empty(), "valid files", "%d read%s", good, bad.c_str());

    std::string folder = test_folder + "/run";
    make_folder(folder);
    test_checkpoint_read_back(victims[CHECKPOINT]);
    test_newest_checkpoint(victims[CHECKPOINT], folder);
    test_metrics_on_resume(folder);
}

static void test_config_files() {
    // Whatever the flags are, the file that is written for them says the same.
    Dice dice{31};
    std::string bad;
    std::string path = test_folder + "/config.txt";
    const char* const pieces[] = {" ", "#", "\"", "\\", "=", "a", "x/y", "\t", "'", "é"};
    for (int i = 0; i < 2000 && bad.empty(); i++) {
        std::string name = "x";
        for (int k = 1 + dice.below(6); k > 0; k--) name += pieces[dice.below(10)];
        name += "x";
        Config config = config_of({{"data_file", name},
                                   {"out_dir", name + "é"},
                                   {"model_weights", i % 2 ? name : ""},
                                   {"lr", text("%.9g", 1e-4 * (1 + dice.below(1000000) * 1e-6))},
                                   {"seed", text("%u", dice.next())},
                                   {"attention_resolutions", i % 3 ? "16,4" : "0"},
                                   {"predict", "v"},
                                   {"flip", "1"}});
        write_whole(path, config_text(config));
        std::string message = refusal([&] {
            Config again = given_config(read_config_file(path));
            for (const Flag& flag : FLAGS)
                if (flag.group != OTHER && flag_text(again, flag) != flag_text(config, flag)) bad = flag.name;
        });
        if (!message.empty()) bad = message;
    }
    report(bad.empty(), "configuration, written and read", "names with spaces, quotes and #: %s",
           bad.c_str());

    const struct {
        const char *line, *flag, *value;
    } forms[] = {{"lr 1e-3", "lr", "0.001"},
                 {"  lr=1e-3  ", "lr", "0.001"},
                 {"\tlr\t=\t1e-3\r", "lr", "0.001"},
                 {"out_dir = my run # 2", "out_dir", "my run # 2"},
                 {"out_dir the \"run\" ", "out_dir", "the \"run\""},
                 {"val_file =", "val_file", ""},
                 {"val_file", "val_file", ""},
                 {"data_file = =x", "data_file", "=x"},
                 {"channel_mult 1,2", "channel_mult", "1,2"}};
    for (auto& form : forms) {
        Config config = given_config(parse_config(form.line, "here"));
        if (flag_text(config, flag_named(form.flag)) != form.value) bad += form.line;
    }
    report(bad.empty(), "lines of a configuration", "%zu ways to write them%s", std::size(forms), bad.c_str());

    // Random bytes in such a file: an answer or one sentence.
    int accepted = 0, rejected = 0;
    std::string whole = config_text(default_config());
    for (int i = 0; i < 5000; i++) {
        std::string broken = whole;
        int edits = 1 + dice.below(3);
        for (int k = 0; k < edits; k++) {
            size_t at = dice.below((uint32_t)broken.size());
            if (dice.one_in(2)) broken[at] = (char)dice.next();
            else broken.erase(at, 1 + dice.below(3));
        }
        write_whole(path, broken);
        std::string message = refusal([&] { check_config(given_config(read_config_file(path))); });
        if (message.empty()) {
            accepted++;
            continue;
        }
        rejected++;
        if (!is_sentence(message)) bad = message;  // although the file may hold any bytes
    }
    report(bad.empty() && accepted > 300 && rejected > 300, "broken configurations",
           "%d accepted, %d refused with one sentence each%s", accepted, rejected, bad.c_str());
}

// Writes another value into one field of a header, with the checksum as it was, then with the right one; reads both.
static void read_with_field(const Victim& v, int field, int32_t value, Tally* tally) {
    const int32_t* header = (const int32_t*)v.content.data();
    for (bool sealed : {false, true}) {
        if (!sealed && v.checksum_field() < 0) continue;
        int32_t copy[HEADER_INTS];
        memcpy(copy, header, sizeof copy);
        copy[field] = value;
        if (sealed) seal_header(v, copy, v.data_checksum);
        put(v, 0, copy, sizeof copy);
        bool right = sealed || same_bits(copy, header, sizeof copy);
        read_victim(v, v.size, right, false, text("field %d = %d", field, value), tally);
    }
}

// The old format of images has fields without a meaning, which are ignored, whatever they hold.
static void test_undefined_fields(const Victim& v, Dice* dice, Tally* tally) {
    Tally undefined;
    for (int field = 10; field < HEADER_INTS; field++) {
        int32_t copy[HEADER_INTS];
        memcpy(copy, v.content.data(), sizeof copy);
        copy[field] = (int32_t)dice->next();
        put(v, 0, copy, sizeof copy);
        read_victim(v, v.size, true, false, text("undefined field %d", field), &undefined);
    }
    put(v, 0, v.content.data(), HEADER_BYTES);
    if (undefined.refused && tally->bad.empty())
        tally->bad = text("; %s: an undefined field is not ignored", KIND_NAMES[v.kind]);
}

static void test_corrupted_fields(const std::vector<Victim>& victims) {
    Tally tally;
    Dice dice{6};
    running = "header fields";
    for (const Victim& v : victims) {
        const int32_t* header = (const int32_t*)v.content.data();
        for (int field = 0; field < HEADER_INTS; field++) {
            // The header of a checkpoint is that of a file of weights alone, which is tried at full length.
            if (v.kind == CHECKPOINT && field > 175) break;
            int32_t value = header[field];
            const int32_t values[] = {0,
                                      -1,
                                      1,
                                      INT_MAX,
                                      INT_MIN,
                                      (int32_t)((uint32_t)value + 1),
                                      (int32_t)((uint32_t)value - 1),
                                      (int32_t)dice.next(),
                                      (int32_t)dice.below(100),
                                      header[(field + HEADER_INTS - 1) % HEADER_INTS],  // its neighbours'
                                      header[(field + 1) % HEADER_INTS],
                                      0x7FC00000 /* NaN */};
            // Weights are long to read, so -1 and 1 must do for a field of theirs that means nothing and is 0.
            bool means_nothing = !value && field > FIELD_LR_STEPS;
            size_t tries = v.kind >= WEIGHTS && means_nothing ? 3 : std::size(values);
            for (size_t i = 0; i < tries; i++)
                if (values[i] != value) read_with_field(v, field, values[i], &tally);
        }
        put(v, 0, v.content.data(), HEADER_BYTES);
        if (v.kind == OLD_IMAGES) test_undefined_fields(v, &dice, &tally);
    }
    report_tally("header fields", tally);
}

static void test_truncated_files(const std::vector<Victim>& victims) {
    Tally tally;
    running = "truncated files";
    for (const Victim& v : victims) {
        std::vector<size_t> sizes;
        for (size_t size = 0; size <= 1100; size++) sizes.push_back(size);
        for (size_t size = 4096; size < v.size; size += 4096) sizes.push_back(size);
        for (size_t less = 1; less <= 8; less++) sizes.push_back(v.size - less);
        for (size_t more : {1, 4, 4096}) sizes.push_back(v.size + more);
        std::sort(sizes.rbegin(), sizes.rend());  // shrinking in place; the file is mended afterwards
        for (size_t size : sizes) {
            if (size == v.size) continue;
            assert(ftruncate(v.fd, (off_t)size) == 0);
            read_victim(v, size, false, false, text("%zu of %zu bytes", size, v.size), &tally);
        }
        put(v, 0, v.content.data(), v.content.size());
        assert(ftruncate(v.fd, (off_t)v.size) == 0);
    }
    report(tally.accepted == 0 && tally.bad.empty(), "truncated files",
           "%ld lengths, each refused with one sentence%s", tally.refused, tally.bad.c_str());
}

// A value that a field may not be able to hold, at random: small, huge, near the one it has, or a float.
static int32_t odd_value(Dice* dice, int32_t value) {
    static const float reals[] = {NAN, INFINITY, -1.0f, 1e30f, 0.0f, -0.0f, 1e-40f};
    int32_t bits;
    switch (dice->below(9)) {
        case 0: return (int32_t)dice->next();
        case 1: return (int32_t)dice->below(70);
        case 2: return -(int32_t)dice->below(3);
        case 3: return dice->one_in(2) ? INT_MAX : INT_MIN;
        case 4: return (int32_t)((uint32_t)value + dice->below(5) - 2);
        case 5: return (int32_t)(1u << dice->below(32));
        case 6: return (int32_t)((uint32_t)value << dice->below(4));
        case 7: return value ^ (int32_t)(1u << dice->below(32));
        default:
            memcpy(&bits, &reals[dice->below(7)], sizeof bits);
            return bits;
    }
}

// What is changed in a file: its header, bytes behind the header, its length.
struct Mutation {
    int32_t header[HEADER_INTS];
    std::vector<std::pair<size_t, char>> bytes;  // places and values
    size_t size;
};

static void edit_at_random(Mutation* m, const Victim& v, Dice* dice) {
    int32_t* const header = m->header;
    switch (dice->below(8)) {
        case 0:
        case 1:
        case 2: {  // a field that means something, or a letter of a setting
            if (v.settings.bytes && !dice->one_in(3)) {
                static const char letters[] = "0123456789.,- =\nex";
                size_t at = v.settings.offset + dice->below((uint32_t)v.settings.bytes);
                m->bytes.push_back({at, letters[dice->below(sizeof letters - 1)]});
                break;
            }
            int field = dice->below(v.kind <= OLD_IMAGES ? 10 : FIELD_LR_STEPS + 1);
            header[field] = odd_value(dice, header[field]);
            break;
        }
        case 3: {  // any field
            int field = dice->below(HEADER_INTS);
            header[field] = odd_value(dice, header[field]);
            break;
        }
        case 4: {  // a section's entry: another's name, or another length
            int32_t* entry = header + FIELD_SECTION_TABLE + SECTION_INTS * dice->below(MAX_SECTIONS);
            const int32_t* other = header + FIELD_SECTION_TABLE + SECTION_INTS * dice->below(6);
            if (dice->one_in(2)) {
                memcpy(entry, other, SECTION_NAME_BYTES);
            } else {
                int32_t length = odd_value(dice, other[6]);
                entry[6 + dice->below(2)] = length;
            }
            break;
        }
        case 5: {  // a bit of the header
            char bit = (char)(1 << dice->below(8));
            ((char*)header)[dice->below(HEADER_BYTES)] ^= bit;
            break;
        }
        case 6: {  // a byte of the data
            if (m->size <= HEADER_BYTES) break;
            size_t at = HEADER_BYTES + dice->below((uint32_t)(v.content.size() - HEADER_BYTES));
            m->bytes.push_back({at, (char)dice->next()});
            break;
        }
        case 7: {  // the length
            if (!dice->one_in(4)) break;
            if (dice->one_in(2)) {
                m->size = dice->below((uint32_t)v.size);
                break;
            }
            size_t longer = dice->below(17) - (size_t)8;  // or shorter: it wraps around
            m->size = v.size + longer * (dice->one_in(2) ? 1 : 512);
            break;
        }
    }
}

// The checksum of what lies behind the header once the file is changed.
static uint32_t checksum_of_data(const Victim& v, const Mutation& m) {
    if (m.bytes.empty() && m.size == v.size) return v.data_checksum;
    if (m.size <= HEADER_BYTES) return 0;
    std::vector<char> changed = v.content;
    for (auto& [at, value] : m.bytes) changed[at] = value;
    changed.resize(m.size);
    return crc32(changed.data() + HEADER_BYTES, m.size - HEADER_BYTES);
}

static void apply(const Mutation& m, const Victim& v) {
    for (auto& [at, value] : m.bytes) put(v, at, &value, 1);
    put(v, 0, m.header, sizeof m.header);
    if (m.size != v.size) assert(ftruncate(v.fd, (off_t)m.size) == 0);
}

static void undo(const Mutation& m, const Victim& v) {
    if (m.size != v.size) {
        assert(ftruncate(v.fd, (off_t)v.size) == 0);
        put(v, 0, v.content.data(), v.content.size());
        return;
    }
    put(v, 0, v.content.data(), HEADER_BYTES);
    for (auto& [at, value] : m.bytes) put(v, at, &v.content[at], 1);
}

// Whether the file may turn out to be the valid one, so that the checksum that it had is right.
static bool may_change_nothing(const Mutation& m, const Victim& v) {
    for (auto& [at, value] : m.bytes)
        if (v.content[at] == value) return true;  // a byte written over with itself
    return m.bytes.empty() && m.size == v.size && same_bits(m.header, v.content.data(), sizeof m.header);
}

// Which of the victims is next. The files of weights are long, so their turn comes less often.
static size_t victim_of(uint32_t turn) {
    if (turn < 24) return WEIGHTS;
    if (turn < 34) return CHECKPOINT;
    if (turn < 50) return NEW_IMAGES;
    if (turn < 66) return LABELLED_IMAGES;
    if (turn < 82) return OLD_IMAGES;
    return FILE_KINDS + turn % 2;  // images that are read at half their size
}

// A mutation is a handful of edits of the header, of a section's entry, of single bytes and of the length;
// half of them leave with a checksum that is right.
static void test_mutations(const std::vector<Victim>& victims, long count, uint32_t seed) {
    Tally tally;
    Dice dice{seed};
    running = "mutations";
    long sealed_count = 0;
    for (long i = 0; i < count; i++) {
        const Victim& v = victims[victim_of(dice.below(100))];
        Mutation m;
        memcpy(m.header, v.content.data(), sizeof m.header);
        m.size = v.size;
        int edits = 1 + dice.below(4);
        for (int edit = 0; edit < edits; edit++) edit_at_random(&m, v, &dice);

        bool sealed = v.checksum_field() < 0;
        if (!sealed && dice.one_in(2)) {
            sealed = true;
            seal_header(v, m.header, checksum_of_data(v, m));
        }
        apply(m, v);
        bool right = sealed || may_change_nothing(m, v);
        read_victim(v, m.size, right, v.kind != CHECKPOINT, text("mutation %ld of seed %u", i, seed), &tally);
        sealed_count += sealed;
        undo(m, v);
    }
    report(
        tally.bad.empty() && tally.refused > count / 4 && tally.accepted > count / 50, "mutations",
        "%ld, %ld of them with a right checksum: %ld refused with one sentence, %ld read; slowest %.1f ms%s",
        count, sealed_count, tally.refused, tally.accepted, 1e3 * tally.slowest, tally.bad.c_str());
}

typedef std::vector<std::pair<std::string, std::string>> Sections;  // names and contents

// A weights file of these sections, whatever they hold, with a right table and checksum.
static std::vector<char> sealed_weights(const int32_t* fields, const Sections& sections) {
    int32_t header[HEADER_INTS];
    memcpy(header, fields, sizeof header);
    memset(header + FIELD_SECTION_TABLE, 0, sizeof header - FIELD_SECTION_TABLE * sizeof(int32_t));
    header[FIELD_SECTIONS] = (int32_t)sections.size();

    std::vector<char> content(HEADER_BYTES);
    int32_t* entry = header + FIELD_SECTION_TABLE;
    for (auto& [name, data] : sections) {
        uint64_t bytes = data.size();
        memcpy(entry, name.data(), std::min(name.size(), (size_t)SECTION_NAME_BYTES));
        memcpy(entry + SECTION_NAME_BYTES / 4, &bytes, sizeof bytes);
        content.insert(content.end(), data.begin(), data.end());
        entry += SECTION_INTS;
    }
    memcpy(content.data(), header, sizeof header);
    seal(&content, FIELD_CHECKSUM);
    return content;
}

// Another line in the section config.
static void add_setting(Sections* sections, const std::string& name, const std::string& value) {
    for (auto& [section, data] : *sections)
        if (section == "config") data += name + " = " + value + "\n";
}

// Images whose header, labels, names and length fit each other or nearly do.
static std::vector<char> sealed_images(Dice* dice) {
    static const int32_t sizes[] = {1, 2, 4, 8, 9, 16};
    int32_t H = sizes[dice->below(6)];
    int32_t W = dice->one_in(5) ? sizes[dice->below(6)] : H;
    int32_t N = (int32_t)dice->below(5);
    int32_t classes = dice->one_in(2) ? (int32_t)dice->below(4) : 0;
    int32_t names = classes ? (int32_t)dice->below(40) : 0;
    int32_t header[HEADER_INTS] = {IMAGES_MAGIC, N, 3, H, W, 1, IMAGES_UINT8, classes, names};
    size_t bytes = (size_t)N * 3 * H * W + (classes ? 4 * N + names : 0);
    if (dice->one_in(4)) {
        int32_t odd = odd_value(dice, header[1 + dice->below(8)]);
        header[1 + dice->below(8)] = odd;
    }

    std::vector<char> content(HEADER_BYTES);
    memcpy(content.data(), header, sizeof header);
    while (content.size() < HEADER_BYTES + bytes) content.push_back((char)dice->next());
    if (dice->one_in(8)) content.resize(HEADER_BYTES + dice->below((uint32_t)bytes + 9));
    seal(&content, IMAGES_CHECKSUM_FIELD);
    return content;
}

// Any bytes as the name of a file, at times longer than one may be.
static std::string hostile_path(Dice* dice) {
    std::string path;
    int longest = dice->one_in(4) ? 2 * MAX_PATH_LENGTH : 20;
    int length = dice->below(longest);
    for (int k = 0; k < length; k++) path += dice->one_in(3) ? (char)dice->next() : (char)(32 + dice->below(95));
    return path;
}

static void edit_sections(Sections* sections, Dice* dice) {
    static const char* const names[] = {"weights",
                                        "ema",
                                        "ema_2",
                                        "adam_m",
                                        "state",
                                        "config",
                                        "",
                                        "more",
                                        "class_names",
                                        "data_checksum",
                                        "a name of 24 bytes, whole"};
    const uint32_t all = std::size(names);
    auto& [name, data] = (*sections)[dice->below((uint32_t)sections->size())];
    switch (dice->below(8)) {
        case 0: name = names[dice->below(all)]; break;
        case 1: std::swap(data, (*sections)[dice->below((uint32_t)sections->size())].second); break;
        case 2:  // up to 4 bytes shorter, or longer
            data.resize(data.size() + dice->below(9) - std::min(data.size(), (size_t)4));
            break;
        case 3:
            if (sections->size() < MAX_SECTIONS) sections->push_back((*sections)[dice->below(4)]);
            sections->back().first = names[dice->below(all)];
            break;
        case 4: {
            static const char* const files[] = {"data_file", "val_file", "model_weights"};
            std::string path = hostile_path(dice);
            add_setting(sections, files[dice->below(3)], path);
            break;
        }
        case 5: {  // a float that is no number
            float value = dice->one_in(2) ? NAN : INFINITY;
            if (data.size() < sizeof value) break;
            memcpy(&data[4 * dice->below((uint32_t)data.size() / 4)], &value, sizeof value);
            break;
        }
        case 6: {  // a byte
            if (data.empty()) break;
            char value = (char)dice->next();
            data[dice->below((uint32_t)data.size())] = value;
            break;
        }
        case 7: {  // another setting
            static const char* const values[] = {"0", "1", "2", "-1", "64", "0.5", "1e-9", "1e39", "",
                                                 "1,2,3", "0,0", "nan", "v", "ddim", "1 1"};
            const Flag& flag = FLAGS[dice->below((uint32_t)FLAGS.size())];
            add_setting(sections, flag.name, values[dice->below(15)]);
            break;
        }
    }
}

// Files written anew with a right table and checksum, so that all that is behind the checksum is reached:
// other sections, other names and lengths, hostile names of files, numbers that are none, odd fields.
static void test_sealed_files(const std::vector<Victim>& victims, long count, uint32_t seed) {
    Tally tally;
    Dice dice{seed};
    running = "files with a right checksum";
    const Victim& v = victims[CHECKPOINT];
    WeightsFile file = open_weights(v.path);
    Sections whole;
    for (auto& [name, section] : file.sections)  // two sets of parameters are enough
        if (name != "ema_2" && name != "adam_m" && name != "adam_v")
            whole.push_back({name, std::string(&v.content[section.offset], section.bytes)});

    for (long i = 0; i < count && tally.bad.empty(); i++) {
        Victim now = {};
        now.path = test_folder + "/sealed.bin";
        std::vector<char> content;
        bool images = i % 2;
        if (images) {
            now.kind = NEW_IMAGES;
            now.image_size = dice.one_in(2) ? 0 : 4;
            content = sealed_images(&dice);
        } else {
            now.kind = CHECKPOINT;
            Sections sections = whole;
            int edits = 1 + dice.below(3);
            for (int edit = 0; edit < edits; edit++) edit_sections(&sections, &dice);
            content = sealed_weights((const int32_t*)v.content.data(), sections);
        }
        write_whole(now.path, content, content.size());
        read_victim(now, content.size(), true, true, text("file %ld of seed %u", i, seed), &tally);
    }
    report(tally.bad.empty() && tally.refused > count / 4 && tally.accepted > count / 20,
           "files with a right checksum", "%ld refused with one sentence, %ld read; slowest %.1f ms%s",
           tally.refused, tally.accepted, 1e3 * tally.slowest, tally.bad.c_str());
}

// What training must never leave behind: weights that are no numbers. What was there stays as it was.
static void test_unwritten_weights() {
    std::string path = test_folder + "/broken.bin", bad;
    Model m = Model();
    build_model(&m, smallest_config(), 1, true);
    perturbed_weights(&m, 5);
    write_checkpoint(path, m, 40, 0.25f, some_history());
    std::string before = read_text(path);
    size_t files = files_in(test_folder);
    for (float value : {NAN, INFINITY, -INFINITY}) {
        for (float* parameters : {m.master, m.ema[1], m.adam_v}) {
            std::swap(parameters[1234], value);
            std::string message = refusal([&] { write_checkpoint(path, m, 41, 0.25f, some_history()); });
            std::swap(parameters[1234], value);
            if (!is_sentence(message) || message.find(path) == std::string::npos) bad += "; " + message;
        }
    }
    report(bad.empty() && read_text(path) == before && files_in(test_folder) == files,
           "weights that are no numbers", "are never written%s", bad.c_str());
}

// A file of images of two classes, whose names are these.
static void write_images_with_names(const std::string& path, const std::string& names) {
    std::vector<char> content = image_file(6, 8, false, true);
    content.erase(content.end() - strlen("cat\ndog\n"), content.end());
    content.insert(content.end(), names.begin(), names.end());
    int32_t bytes = (int32_t)names.size();
    memcpy(&content[8 * sizeof bytes], &bytes, sizeof bytes);
    seal(&content, IMAGES_CHECKSUM_FIELD);
    write_whole(path, content, content.size());
}

// The same of weights.
static void write_weights_with_names(const std::string& path, const std::string& names) {
    Config config = smallest_config();
    config.class_cond = 1;
    config.num_classes = 2;
    Model m = Model();
    build_model(&m, config, 1, false);
    perturbed_weights(&m, 5);
    write_checkpoint(path, m, 40, 0.25f, some_history());

    Section weights = open_weights(path).sections["weights"];
    Sections sections = {{"weights", read_text(path).substr(weights.offset, weights.bytes)},
                         {"config", stored_config(config)},
                         {"class_names", names}};
    std::vector<char> content = sealed_weights(Reader(path).header, sections);
    write_whole(path, content, content.size());
}

// The names of classes in files of images and of weights: what can't be names is refused, each with its reason.
static void test_class_names() {
    std::string path = test_folder + "/names.bin", bad;
    const struct {
        std::string names, says;  // of two classes; "" where they are fine
    } cases[] = {{"cat\ndog\n", ""},
                 {"10\n9\n", ""},
                 {"d\xC3\xB8g\n\xF0\x9F\x90\x88\n", ""},
                 {"cat, the small\n0-4\n", ""},
                 {"cat\n", "1 names of classes for 2 classes"},
                 {"cat\ndog\nfox\n", "3 names of classes for 2 classes"},
                 {"cat\ndog", "1 names of classes for 2 classes"},
                 {"cat\ndog\nfox", "2 names of classes for 2 classes"},
                 {"", "0 names of classes for 2 classes"},
                 {"cat\ncat\n", "two classes called cat"},
                 {"cat\n\n", "a class without a name"},
                 {std::string("c\0t\ndog\n", 8), "UTF-8"},
                 {"cat\xFF\ndog\n", "UTF-8"},
                 {"cat\xC3\ndog\n", "UTF-8"},          // a letter that ends too soon
                 {"cat\x80\ndog\n", "UTF-8"},          // begins too late
                 {"cat\xC0\xAF\ndog\n", "UTF-8"},      // has more bytes than it needs
                 {"cat\xED\xA0\x80\ndog\n", "UTF-8"},  // is half of a pair of UTF-16
                 {"cat\xF4\x90\x80\x80\ndog\n", "UTF-8"},
                 {std::string(300, 'x') + "\n" + std::string(300, 'x') + "\n", "two classes called xxx"}};
    for (auto& c : cases) {
        for (bool images : {true, false}) {
            if (images) write_images_with_names(path, c.names);
            else write_weights_with_names(path, c.names);

            std::vector<std::string> found;
            std::string message = refusal([&] {
                Config wanted = {};
                wanted.image_size = 8;
                wanted.in_channels = 3;
                found = images ? read_images(path, wanted).class_names : open_weights(path).class_names;
            });
            std::string joined;
            for (const std::string& name : found) joined += name + "\n";

            // Weights may name fewer classes than they have, or none.
            bool fewer = !images && (c.names == "cat\n" || c.names.empty());
            bool right;
            if (c.says.empty() || fewer) {
                right = message.empty() && joined == c.names;
            } else {
                right = is_sentence(message) && message.find(c.says) != message.npos &&
                        message.find(path) != message.npos;
            }
            if (!right) bad += text("; %s: '%s'", printable(c.names).c_str(), message.c_str());
        }
    }
    report(bad.empty(), "names of classes", "%zu, in images and in weights%s", std::size(cases), bad.c_str());
}

// A table of sections: names and lengths.
typedef std::vector<std::pair<std::string, uint64_t>> Table;

// Puts another table into the header of a file of weights, and the checksum that is then right.
static void put_table(const Victim& v, const Table& table) {
    int32_t header[HEADER_INTS];
    memcpy(header, v.content.data(), sizeof header);
    memset(header + FIELD_SECTION_TABLE, 0, sizeof header - FIELD_SECTION_TABLE * sizeof(int32_t));
    header[FIELD_SECTIONS] = (int32_t)table.size();
    for (size_t i = 0; i < table.size(); i++) {
        auto& [name, bytes] = table[i];
        int32_t* entry = header + FIELD_SECTION_TABLE + SECTION_INTS * i;
        memcpy(entry, name.data(), name.size());
        memcpy(entry + SECTION_NAME_BYTES / 4, &bytes, sizeof bytes);
    }
    seal_header(v, header, v.data_checksum);
    put(v, 0, header, sizeof header);
}

// Files that random changes do not hit upon: each must be refused, its checksum being right.
static void test_crafted_files(const std::vector<Victim>& victims) {
    const Victim& v = victims[CHECKPOINT];
    uint64_t whole = make_plan(smallest_config(), 1, false).num_parameters * sizeof(float);
    uint64_t texts = v.settings.bytes + strlen("0123abcd");
    uint64_t rest = v.size - HEADER_BYTES - texts;
    bool sound = rest == 5 * whole + sizeof(History);  // the tables below are made for this file
    const Table tables[] = {
        // lengths that sum up to the file's only because 64 bits overflow
        {{"pad", 0 - whole}, {"weights", whole}, {"more", rest}},
        {{"pad", 0 - (uint64_t)HEADER_BYTES}, {"weights", whole}, {"more", rest - whole + HEADER_BYTES}},
        {{"weights", whole}, {"a", UINT64_MAX}, {"b", rest - whole + 1}},
        // lengths of other models, in a sum that is right
        {{"weights", whole - 4}, {"ema", whole + 4}, {"more", rest - 2 * whole}},
        {{"weights", whole}, {"ema", whole + 4}, {"more", rest - 2 * whole - 4}},
        {{"weights", whole}, {"adam_m", 0}, {"adam_v", 0}, {"more", rest - whole}},
        {{"weights", rest}},
        // two of a name; none of weights; too short a sum
        {{"weights", whole}, {"weights", whole}, {"more", rest - 2 * whole}},
        {{"ema", whole}, {"adam_m", whole}, {"more", rest - 2 * whole}},
        {{"weights", whole}, {"more", rest - whole - 4}},
        {{"weights", whole}, {"ema_4", whole + 4}, {"more", rest - 2 * whole - 4}},
        {{"weights", whole}, {"state", rest - whole}},
    };

    int refused = 0, count = 0;
    std::string bad;
    auto expect_refusal = [&](const Victim& file) {
        std::string wrong;
        std::string message = refusal([&] { wrong = use_file(file, true); });
        count++;
        if (is_sentence(message)) refused++;
        else bad += text("; file %d: '%s' %s", count, message.c_str(), wrong.c_str());
    };
    for (Table table : tables) {
        table.push_back({"config", v.settings.bytes});
        table.push_back({"data_checksum", strlen("0123abcd")});
        put_table(v, table);
        expect_refusal(v);
    }
    put(v, 0, v.content.data(), HEADER_BYTES);

    // Counts and a loss that can't be, in the section `state`.
    const std::pair<size_t, int32_t> damages[] = {
        {0, -1}, {0, 4}, {4, -1}, {4, 38}, {8, 0x7FC00000 /* NaN */}, {sizeof(History) - 4, 0x7F800000}};
    for (auto [offset, value] : damages) {
        std::vector<char> changed = v.content;
        size_t at = HEADER_BYTES + 5 * whole + offset;
        memcpy(&changed[at], &value, sizeof value);
        seal(&changed, FIELD_CHECKSUM);
        put(v, at, &value, sizeof value);
        put(v, 0, changed.data(), HEADER_BYTES);
        expect_refusal(v);
        put(v, at, &v.content[at], sizeof value);
        put(v, 0, v.content.data(), HEADER_BYTES);
    }

    // Pixels outside [-1, 1], and one within, which is read.
    const Victim& images = victims[OLD_IMAGES];
    for (float pixel : {NAN, INFINITY, -INFINITY, 2.0f, -1.5f, 1e-3f}) {
        size_t at = images.size - sizeof pixel;
        put(images, at, &pixel, sizeof pixel);
        if (pixel == 1e-3f) sound &= refusal([&] { use_file(images, true); }).empty();
        else expect_refusal(images);
        put(images, at, &images.content[at], sizeof pixel);
    }
    report(bad.empty() && sound, "crafted files", "%d of %d refused with one sentence%s", refused, count,
           bad.c_str());
}

static void test_readers(long mutations, uint32_t seed) {
    std::vector<Victim> victims;
    for (int kind = 0; kind < FILE_KINDS; kind++) victims.push_back(make_victim((FileKind)kind));
    victims.push_back(make_victim(NEW_IMAGES, 4));  // box-filtered to half the size
    victims.push_back(make_victim(OLD_IMAGES, 4));
    size_t files = files_in("/proc/self/fd");

    test_valid_files(victims);
    test_config_files();
    test_corrupted_fields(victims);
    test_truncated_files(victims);
    test_crafted_files(victims);
    test_mutations(victims, mutations, seed);
    test_sealed_files(victims, mutations / 20, seed);
    test_unwritten_weights();
    test_class_names();

    running = "after the mutations";
    bool mended = true;
    std::string wrong;
    for (const Victim& v : victims) mended &= refusal([&] { wrong += use_file(v, true); }).empty();
    size_t left = files_in("/proc/self/fd");
    report(mended && wrong.empty() && left == files, "no file left open",
           "%zu before and %zu after, and the valid files can be read again", files, left);
    for (const Victim& v : victims) close(v.fd);
}

// ---- main -------------------------------------------------------------------------------------------------

static int run_tests(int argc, char** argv) {
    bool counts = argc >= 3 && !strcmp(argv[1], "--fuzz");
    bool seeded = counts && argc == 5 && !strcmp(argv[3], "--seed");
    if (argc > 1 && !(counts && (argc == 3 || seeded))) fail_usage("usage: readers [--fuzz N [--seed S]]");
    begin_tests();

    const char* temporary = getenv("TMPDIR");
    test_folder = text("%s/readers_XXXXXX", temporary ? temporary : "/tmp");
    if (!mkdtemp(&test_folder[0])) fail("can't make a folder like %s", test_folder.c_str());
    test_readers(counts ? atol(argv[2]) : 2000, seeded ? (uint32_t)atol(argv[4]) : 1);
    if (system(("rm -r '" + test_folder + "'").c_str())) fail("can't remove %s", test_folder.c_str());
    return summary();
}

int main(int argc, char** argv) {
    return guarded([&] { return run_tests(argc, argv); });
}
