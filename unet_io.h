// unet_io.h: what train_unet.cu reads and writes: flags, and files of images, weights, pictures and logs.
// unet_io.py is the same in Python.
//
// train_unet.cu includes it behind its Config, whose fields the flags set.
#pragma once

// ---- errors and sentences ---------------------------------------------------------------------------------
static constexpr bool is_one_of(std::string_view letters, char c) { return letters.find(c) != letters.npos; }

// The letter that stands for an argument's type in Format: s for a text, g for a floating-point number, d for an
// integer and l for a long one. 0 stands for what printf can't print.
template <typename T> consteval char letter_of() {
    bool is_integer = std::is_integral_v<T> || std::is_enum_v<T>;
    if (std::is_floating_point_v<T>) return 'g';
    if (std::is_same_v<T, long> || std::is_same_v<T, unsigned long>) return 'l';
    if (is_integer && sizeof(T) <= sizeof(int)) return 'd';
    if (std::is_convertible_v<T, std::string>) return 's';
    return 0;
}

// A format of printf that fits arguments of these types. The compiler evaluates the constructor, where a throw is a
// compile error.
template <typename... Args> struct Format {
    const char* format;
    consteval Format(const char* format) : format(format) {
        const char letters[] = {letter_of<Args>()..., 0};
        const char* next = letters;
        auto take = [&](char letter) {
            if (*next++ != letter) throw "the format does not fit its arguments";
        };

        for (const char* c = format; *c; c++) {
            if (*c != '%') continue;
            c++;
            if (*c == '%') continue;  // %% prints a percent sign

            bool is_long = false;
            for (; !is_one_of("cdefgsuxX", *c); c++) {
                if (*c == '*') take('d');  // a width or precision that is an argument
                if (*c == 'l' || *c == 'z') is_long = true;
            }
            if (*c == 's') take('s');
            else if (is_one_of("efg", *c)) take('g');
            else take(is_long ? 'l' : 'd');
        }
        take(0);
    }
};

static std::string formatted(const char* format, ...) {
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    std::string line(vsnprintf(nullptr, 0, format, args), 0);
    vsnprintf(line.data(), line.size() + 1, format, again);
    va_end(again);
    va_end(args);
    return line;
}

static const char* as_argument(const std::string& argument) { return argument.c_str(); }
static auto as_argument(const auto& argument) { return argument; }

// printf into a string, and onto standard output. %s takes a std::string too.
template <typename... Args>
static std::string text(Format<std::type_identity_t<Args>...> format, const Args&... args) {
    return formatted(format.format, as_argument(args)...);
}
#define print(...) fputs(text(__VA_ARGS__).c_str(), stdout)

// Bytes as a message may show them: a control byte becomes \x1B, so that no file's name can drive the terminal.
// The control characters of UTF-8 have two bytes, of which the first is 0xC2.
static std::string printable(const std::string& bytes) {
    std::string shown;
    for (uint8_t byte : bytes) {
        bool ends_pair = shown.ends_with('\xC2') && byte >= 0x80 && byte < 0xA0;
        if (ends_pair) shown.replace(shown.size() - 1, 1, "\\xC2");

        bool is_control = ends_pair || byte < ' ' || byte == 127;
        if (is_control) shown += text("\\x%02X", byte);
        else shown += (char)byte;
    }
    return shown;
}

// A mistake that the user can mend. The sentence names the file, flag or value and says what to do.
struct Failure {
    int status;  // that the program exits with: 2 where the command line is wrong, otherwise 1
    std::string sentence;
};
#define fail(...) throw Failure({1, printable(text(__VA_ARGS__))})
#define fail_usage(...) throw Failure({2, printable(text(__VA_ARGS__))})

// Does `work`, whose failure need not end the program. Returns the sentence that it fails with, "" where it succeeds.
static std::string failure_of(auto work) {
    try {
        work();
    } catch (const Failure& failure) {
        return failure.sentence;
    }
    return "";
}

// Prints a line, which may hold names of files and classes.
#define say(...) puts(printable(text(__VA_ARGS__)).c_str())

// Tells the user of something that went wrong and that the program can go on without.
static void note(const std::string& sentence) {
    if (!world.rank) fprintf(stderr, "note: %s\n", printable(sentence).c_str());
}

// "1 picture", "2 pictures"
static std::string counted(long n, const char* noun) { return text("%ld %s%s", n, noun, n == 1 ? "" : "s"); }

// The shortest text that reads back as the same float.
static std::string float_text(float value) {
    char shown[32];
    return {shown, std::to_chars(shown, std::end(shown), value, std::chars_format::general).ptr};
}

// A number as JSON, which knows no NaN.
static std::string json_number(double value) { return std::isfinite(value) ? text("%.9g", value) : "null"; }

typedef std::vector<std::string> Strings;

static Strings split(const std::string& whole, char mark) {
    Strings parts(1);
    for (char c : whole) {
        if (c == mark) parts.emplace_back();
        else parts.back() += c;
    }
    return parts;
}

// The place of a name in a list; -1 where it is not there.
static int index_of(const Strings& names, const std::string& name) {
    auto at = std::ranges::find(names, name);
    if (at == names.end()) return -1;
    return (int)(at - names.begin());
}

static bool contains(const Strings& names, const std::string& name) { return index_of(names, name) >= 0; }

// "apple, banana and 3 more": names in a sentence, at most as many as one can take in.
static std::string listed(const Strings& names) {
    const size_t most = 8;
    std::string sentence;
    for (size_t i = 0; i < std::min(names.size(), most); i++) {
        bool is_last = i + 1 == names.size();
        if (i) sentence += is_last ? " and " : ", ";
        sentence += names[i];
    }
    if (names.size() > most) sentence += text(" and %zu more", names.size() - most);
    return sentence;
}

// Whether the bytes are UTF-8 (RFC 3629): whole letters, each in as few bytes as can be.
static bool is_utf8(const std::string& bytes) {
    static const uint32_t least[] = {0, 0x80, 0x800, 0x10000};  // the first letter of 1, 2, 3 and 4 bytes
    size_t i = 0;
    while (i < bytes.size()) {
        uint8_t first = (uint8_t)bytes[i++];
        if (first < 0x80) continue;
        int more = std::countl_one(first) - 1;  // bytes behind the first
        if (more < 1 || more > 3) return false;

        uint32_t letter = first & (0x3F >> more);
        for (int k = 0; k < more; k++) {
            if (i == bytes.size()) return false;
            uint8_t next = (uint8_t)bytes[i++];
            if (next >> 6 != 0b10) return false;
            letter = letter << 6 | (next & 0x3F);
        }

        bool is_surrogate = letter >= 0xD800 && letter < 0xE000;
        if (letter < least[more] || letter > 0x10FFFF || is_surrogate) return false;
    }
    return true;
}

// A path as a word for the shell.
static std::string shell_word(const std::string& path) {
    const char* plain = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789/._-+,=:@%";
    if (!path.empty() && path.find_first_not_of(plain) == path.npos) return path;

    std::string quoted = "'";
    for (char c : path) {
        if (c == '\'') quoted += "'\\'";
        quoted += c;
    }
    return quoted + "'";
}

static bool has_ending(const std::string& path, const char* ending) {
    size_t length = strlen(ending);
    if (path.size() < length) return false;
    return strcasecmp(&path[path.size() - length], ending) == 0;
}

static std::string human_bytes(double bytes) {
    if (bytes >= 1e9) return text("%.2f GB", bytes / 1e9);
    if (bytes >= 1e6) return text("%.1f MB", bytes / 1e6);
    return text("%.1f kB", bytes / 1e3);
}

static std::string human_time(double seconds) {
    long s = (long)(seconds + 0.5);
    if (s < 10) return text("%.1fs", seconds);
    if (s < 60) return text("%.0fs", seconds);
    if (s < 3600) return text("%ldm %02lds", s / 60, s % 60);
    return text("%ldh %02ldm", s / 3600, s / 60 % 60);
}

static double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// ---- checksums --------------------------------------------------------------------------------------------
// Entry k, i is the sum of byte i with k zeros behind it.
typedef std::array<std::array<uint32_t, 256>, 16> CrcTable;

static CrcTable make_crc_table() {
    CrcTable table;
    for (int k = 0; k < 16; k++)
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t crc = k ? table[k - 1][i] : i;
            for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (crc & 1) * 0xEDB88320u;
            table[k][i] = crc;
        }
    return table;
}

// CRC-32 as zlib computes it, 16 bytes at a time. A sum goes on over more data where it is passed in.
static uint32_t crc32(const void* data, size_t bytes, uint32_t crc = 0) {
    static const CrcTable table = make_crc_table();
    const uint8_t* p = (const uint8_t*)data;
    crc = ~crc;
    while (bytes >= 16) {
        uint64_t words[2];
        memcpy(words, p, 16);
        words[0] ^= crc;
        crc = 0;
        for (int k = 0; k < 16; k++) {
            uint8_t byte = (uint8_t)(words[k / 8] >> (k % 8 * 8));
            crc ^= table[15 - k][byte];
        }
        p += 16;
        bytes -= 16;
    }
    for (; bytes; bytes--) crc = table[0][(crc ^ *p++) & 255] ^ (crc >> 8);
    return ~crc;
}

// ---- files ------------------------------------------------------------------------------------------------
#ifndef NETWORK_ONLY
namespace fs = std::filesystem;
static std::error_code ignored;  // of calls whose errors count as a no

static bool file_exists(const std::string& path) { return fs::exists(path, ignored); }
static bool is_folder(const std::string& path) { return fs::is_directory(path, ignored); }

enum { HEADER_INTS = 256, HEADER_BYTES = 1024 };

// An open file for reading, closed when it leaves its scope; every read is checked.
struct Reader {
    std::unique_ptr<FILE, int (*)(FILE*)> file;
    std::string path;
    size_t size = 0;
    int32_t header[HEADER_INTS] = {0};  // what the file begins with, and zeros where it ends sooner

    explicit Reader(const std::string& name) : file(fopen(name.c_str(), "rb"), fclose), path(name) {
        if (!file) fail("can't open %s: %s", name, strerror(errno));
        struct stat info;
        if (fstat(fileno(file.get()), &info) || !S_ISREG(info.st_mode))
            fail("%s is not a regular file", name);
        size = (size_t)info.st_size;

        read(header, std::min(size, sizeof header));
        seek(0);
    }

    void check(bool ok) {
        if (ok) return;
        const char* why = ferror(file.get()) ? strerror(errno) : "it is truncated";
        fail("could not read %s: %s", path, why);
    }
    void read(void* to, size_t bytes) { check(!bytes || fread(to, 1, bytes, file.get()) == bytes); }
    void seek(size_t offset) { check(!fseeko(file.get(), (off_t)offset, SEEK_SET)); }

    // The next `count` values.
    template <typename Values> Values take(size_t count) {
        Values values(count, 0);
        read(values.data(), count * sizeof values[0]);
        return values;
    }

    // Whether the file's checksum is the one in this field of its header. The sum runs over the data and then over the
    // header, because a writer knows the header last. It counts the field itself as 0, and `header` keeps that 0.
    bool checksum_matches(int field) {
        uint32_t stored = (uint32_t)std::exchange(header[field], 0);

        seek(HEADER_BYTES);
        uint32_t crc = 0;
        size_t left = size - HEADER_BYTES;
        while (left) {
            size_t bytes = std::min(left, (size_t)1 << 20);
            crc = crc32(take<std::vector<char>>(bytes).data(), bytes, crc);
            left -= bytes;
        }
        return crc32(header, HEADER_BYTES, crc) == stored;
    }
};

// The text of a file, or "" where there is no such file. One that is there and can't be read is refused.
static std::string read_text(const std::string& path) {
    if (access(path.c_str(), F_OK) && errno == ENOENT) return "";
    Reader in(path);
    return in.take<std::string>(in.size);
}

// A text that somebody may have typed. Some editors begin it with a byte order mark, which is left out.
static std::string read_typed_text(const std::string& path) {
    Reader in(path);
    std::string contents = in.take<std::string>(in.size);
    if (contents.starts_with("\xEF\xBB\xBF")) contents.erase(0, 3);
    return contents;
}

static Strings list_folder(const std::string& path, std::error_code* error) {
    Strings names;
    for (fs::directory_iterator at(path, *error), end; !*error && at != end; at.increment(*error))
        names.push_back(at->path().filename().string());
    return names;
}

static void make_folder(const std::string& path) {
    std::error_code error;
    fs::create_directories(path, error);
    if (error) fail("can't make the folder %s: %s", path, error.message());
    if (access(path.c_str(), W_OK)) fail("can't write into the folder %s: %s", path, strerror(errno));
}

// Removes the temporary files that killed processes left in a folder. A live Writer holds a lock on its own.
static void remove_stale_temporaries(const std::string& folder) {
    for (const std::string& name : list_folder(folder, &ignored)) {
        if (name.find(".unet-") == std::string::npos || !name.ends_with(".tmp")) continue;
        std::string path = folder + name;
        int file = open(path.c_str(), O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
        if (file < 0) continue;
        bool is_stale = flock(file, LOCK_EX | LOCK_NB) == 0;
        if (is_stale) unlink(path.c_str());
        close(file);
    }
}

// A file that appears under its name only when it is whole: it is written under another name, flushed and renamed.
struct Writer {
    std::string path, folder, temporary;
    FILE* file = nullptr;
    uint32_t crc = 0;

    explicit Writer(const std::string& name) : path(name) {
        if (file_exists(name)) path = fs::canonical(name, ignored);  // the file that a link leads to
        if (file_exists(name) && !fs::is_regular_file(name, ignored))
            fail("can't write %s: it is not a regular file", name);

        folder = path.substr(0, path.rfind('/') + 1);
        if (folder.empty()) folder = "./";
        static std::set<std::string> tidied;
        if (tidied.insert(folder).second) remove_stale_temporaries(folder);

        for (int number = 1; !file; number++) {
            temporary = path + text(".unet-%d-%d.tmp", (int)getpid(), number);
            file = fopen(temporary.c_str(), "wbxe");  // x: fails with EEXIST where the name is in use
            if (!file && errno != EEXIST) fail("can't write %s: %s", name, strerror(errno));
            if (file && locked_too_late()) fclose(std::exchange(file, nullptr));
        }
    }
    Writer(const Writer&) = delete;
    ~Writer() {
        if (!file) return;
        fclose(file);
        unlink(temporary.c_str());
    }

    // Locks the temporary file. Returns whether another process took it for stale and removed it before that.
    bool locked_too_late() {
        if (flock(fileno(file), LOCK_EX)) return false;
        struct stat info;
        if (fstat(fileno(file), &info)) return false;
        return info.st_nlink == 0;
    }

    void check(bool ok) {
        if (!ok) fail("could not write %s: %s; what was there before is untouched", path, strerror(errno));
    }
    void write(const void* data, size_t bytes) {
        check(fwrite(data, 1, bytes, file) == bytes);
        crc = crc32(data, bytes, crc);
    }
    void write(const std::string& contents) { write(contents.data(), contents.size()); }
    void rewind_to_header(const void* header, size_t bytes) {
        check(fseeko(file, 0, SEEK_SET) == 0);
        check(fwrite(header, 1, bytes, file) == bytes);
    }
    void commit() {
        check(fflush(file) == 0);
        check(fsync(fileno(file)) == 0);
        check(rename(temporary.c_str(), path.c_str()) == 0);
        fclose(std::exchange(file, nullptr));  // and with it goes the lock

        // the new name is to survive a power cut too
        int directory = open(folder.c_str(), O_RDONLY | O_CLOEXEC);
        if (directory < 0) return;
        fsync(directory);
        close(directory);
    }
};

static void write_text(const std::string& path, const std::string& contents) {
    Writer out(path);
    out.write(contents);
    out.commit();
}
#endif  // NETWORK_ONLY

static bool all_finite(const float* values, size_t n) {
    bool finite = true;
    for (size_t i = 0; i < n; i++) finite &= fabsf(values[i]) <= FLT_MAX;  // no early exit, so that this is vector code
    return finite;
}

// A float from -1 to 1 as a byte; a NaN is black.
static uint8_t byte_of(float value) {
    float clamped = fminf(fmaxf(value, -1.0f), 1.0f);
    return (uint8_t)((clamped + 1.0f) * 127.5f + 0.5f);
}

static void check_host_memory(double bytes, const std::string& what, const char* instead) {
    double available = (double)host_memory_available();
    if (available && bytes > available)
        fail("%s take %s of memory and %s are free; %s", what, human_bytes(bytes),
             human_bytes(available), instead);
}

// ---- flags ------------------------------------------------------------------------------------------------
// What a flag's value is. Where Config has an array of numbers, the value is a list of them.
enum FlagKind { INT, FLOAT, BOOL, CHOICE, PATH };

// PICTURES say which pictures are drawn, SAMPLING says how: see take_sampling. --config files have no OTHER flags.
enum FlagGroup { FILES, MODEL, DIFFUSION, TRAINING, PICTURES, SAMPLING, OTHER };
static const char* const GROUP_TITLES[] = {"Files", "Model", "Diffusion", "Training", "Pictures", "Sampling", "Other"};

// What --resume does with a flag. A checkpoint stores all but the FORGOTTEN ones. A FREE one may be typed with another
// value, a FIXED one only with the checkpoint's.
enum FlagResume { FORGOTTEN, FREE, FIXED };

struct Flag {
    const char* name;
    size_t offset, size;  // in Config, in bytes
    FlagKind kind;
    FlagGroup group;
    FlagResume on_resume;
    const char* standard;  // the default, as it would be typed
    const char* help;
    double least = 0, most = 1;     // of a number, or of each number in a list
    const char* choices = nullptr;  // the words of a CHOICE, separated by |
};

#define FIELD(name) #name, offsetof(Config, name), sizeof(Config().name)
#define OPTIMISER(name) #name, offsetof(Config, hyper.name), sizeof(Config().hyper.name)
static std::vector<Flag> FLAGS = {
    {FIELD(preset), PATH, FILES, FORGOTTEN, "", "a named set of defaults, such as tiny"},
    {FIELD(data_file), PATH, FILES, FREE, "data/emoji.bin", "training images of prepare_data.py"},
    {FIELD(val_file), PATH, FILES, FREE, "", "validation images, for a loss every --val_every"},
    {FIELD(model_weights), PATH, FILES, FIXED, "", "start from or draw with this .bin's weights"},
    {FIELD(out_dir), PATH, FILES, FORGOTTEN, "out", "folder for checkpoints, grids while training and the log"},
    {FIELD(output_name), PATH, FILES, FORGOTTEN, "samples.png",
     "PNG grid that --generate writes, or X.npy: an array"},
    {FIELD(output_dir), PATH, FILES, FORGOTTEN, "",
     "folder into which --generate also writes each picture, as SEED.png"},

    {FIELD(image_size), INT, MODEL, FIXED, "64", "height and width in pixels", 4, 1024},
    {FIELD(in_channels), INT, MODEL, FIXED, "3", "of an image: 1 grey, 2 grey and alpha, 3 RGB, 4 RGBA", 1, 4},
    {FIELD(num_channels), INT, MODEL, FIXED, "64", "channel_mult's unit, a multiple of 32", 32, 1024},
    {FIELD(channel_mult), FLOAT, MODEL, FIXED, "1,2,3,4",
     "width of each level in units of num_channels, such as 0.5; each level halves the image",
     0.125, 64},
    {FIELD(num_res_blocks), INT, MODEL, FIXED, "2", "residual blocks a level", 1, 16},
    {FIELD(attention_resolutions), INT, MODEL, FIXED, "16,8",
     "image sizes at which residual blocks are followed by attention; 0: none (the middle always has it)",
     0, 1024},
    {FIELD(num_head_channels), INT, MODEL, FIXED, "32", "channels of an attention head", 1, 1024},
    {FIELD(norm_groups), INT, MODEL, FIXED, "32", "groups of a group norm, each of two channels or more", 1, 1024},
    {FIELD(max_period), INT, MODEL, FIXED, "10000", "longest period of the timestep embedding", 2, 100000000},
    {FIELD(num_heads), INT, MODEL, FIXED, "0", "heads of every attention; 0: by --num_head_channels",
     0, 1024},
    {FIELD(num_heads_upsample), INT, MODEL, FIXED, "0", "heads of the decoder's attention; 0: --num_heads", 0, 1024},
    {FIELD(use_scale_shift_norm), BOOL, MODEL, FIXED, "0",
     "the embedding scales and shifts what is normed, instead of being added"},
    {FIELD(dropout), FLOAT, MODEL, FIXED, "0", "part of a block's inner values set to 0", 0, 0.99},
    {FIELD(rescale_timesteps), BOOL, MODEL, FIXED, "0", "give the network timesteps scaled to 1000"},
    {FIELD(resblock_updown), BOOL, MODEL, FIXED, "0", "up- and down-sample in residual blocks"},
    {FIELD(conv_resample), BOOL, MODEL, FIXED, "0", "learn the resampling, by convolutions"},
    {FIELD(learn_sigma), BOOL, MODEL, FIXED, "0", "learn the variance of DDPM's noise too"},
    {FIELD(use_new_attention_order), BOOL, MODEL, FIXED, "1",
     "how generate.py's --export orders q, k and v in a .pt; all else is the same"},
    {FIELD(class_cond), BOOL, MODEL, FIXED, "0", "tell the network each image's class"},
    {FIELD(num_classes), INT, MODEL, FIXED, "0", "classes of --class_cond; 0: those of --data_file", 0, 1e6},
    {FIELD(cond_drop_prob), FLOAT, MODEL, FIXED, "0",
     "hide the class of this part of the images (0.1 is usual), which --guidance_scale needs",
     0, 0.999},

    {FIELD(diffusion_steps), INT, DIFFUSION, FIXED, "1000", "timesteps of the noising chain",
     2, 100000},
    {FIELD(noise_schedule), CHOICE, DIFFUSION, FIXED, "linear",
     "how fast the chain adds noise; flow: a straight line from image to noise, not with --predict eps",
     0, 0, "linear|cosine|flow|edm"},
    {FIELD(predict), CHOICE, DIFFUSION, FIXED, "eps",
     "what the network predicts; flow: noise - image, edm: with EDM's preconditioning",
     0, 0, "eps|v|x0|flow|edm"},
    {FIELD(zero_terminal_snr), BOOL, DIFFUSION, FIXED, "0",
     "make the last timestep noise alone; with linear or cosine, and not with --predict eps"},

    {FIELD(batch_size), INT, TRAINING, FIXED, "32", "images a step", 1, 65536},
    {FIELD(microbatch), INT, TRAINING, FREE, "0",
     "images at a time: a batch's gradients add up over its parts, in less memory; 0: all at once",
     0, 65536},
    {FIELD(steps), INT, TRAINING, FREE, "20000",
     "optimiser steps in all; 0 trains nothing, and saves the initial weights", 0, 99999999},
    {OPTIMISER(optimizer), CHOICE, TRAINING, FIXED, "adamw",
     "muon: Muon for the weights of hidden layers, and AdamW for all others", 0, 0, "adamw|muon"},
    {OPTIMISER(lr), FLOAT, TRAINING, FREE, "1e-4", "learning rate", 0, 1e3},
    {OPTIMISER(lr_schedule), CHOICE, TRAINING, FREE, "constant",
     "how the learning rate falls, over the --steps of the first start, also when resumed with others",
     0, 0, "constant|cosine|linear"},
    {OPTIMISER(final_lr_fraction), FLOAT, TRAINING, FREE, "0", "part of --lr at the end", 0, 1},
    {OPTIMISER(warmup_steps), INT, TRAINING, FREE, "0", "steps over which --lr is reached", 0, 1e9},
    {OPTIMISER(weight_decay), FLOAT, TRAINING, FREE, "0",
     "decoupled, as in AdamW; of matrices and convolutions only, not of biases and norms", 0, 1e3},
    {OPTIMISER(beta1), FLOAT, TRAINING, FREE, "0.9", "AdamW's first moment, and Muon's momentum", 0, 0.99999},
    {OPTIMISER(beta2), FLOAT, TRAINING, FREE, "0.999", "AdamW's second moment", 0, 0.9999999},
    {OPTIMISER(adam_eps), FLOAT, TRAINING, FREE, "1e-8", "AdamW's epsilon", 1e-20, 1},
    {OPTIMISER(grad_clip), FLOAT, TRAINING, FREE, "0",
     "largest norm of the gradient over all parameters; a larger one is scaled down to it; 0: no limit",
     0, 1e9},
    {OPTIMISER(skip_outliers), FLOAT, TRAINING, FREE, "0",
     "leave out an update whose loss or norm is this many standard deviations above the last 128; 0: none",
     0, 1e9},
    {FIELD(timestep_sampling), CHOICE, TRAINING, FIXED, "uniform",
     "how timesteps are drawn: uniformly, or so that log(sigma / alpha) is normal",
     0, 0, "uniform|lognormal"},
    {FIELD(timestep_mean), FLOAT, TRAINING, FIXED, "0",
     "mean of log(sigma / alpha): 0 is usual with --noise_schedule flow, -1.2 with edm", -20, 20},
    {FIELD(timestep_std), FLOAT, TRAINING, FIXED, "1",
     "standard deviation of log(sigma / alpha): 1 is usual with --noise_schedule flow, 1.2 with edm", 0.01, 20},
    {OPTIMISER(ema_rate), FLOAT, TRAINING, FIXED, "0.999",
     "rates of the averaged weights (EMA), up to 4; see --use_ema; 0: none", 0, 0.9999999},
    {FIELD(consistency), BOOL, TRAINING, FIXED, "0",
     "tune --model_weights to draw in one or two steps; --preset consistency says how"},
    {FIELD(consistency_steps), INT, TRAINING, FIXED, "2",
     "with --consistency: the number of steps, 1 or 2, in which the tuned model is to draw best", 1, 2},
    {FIELD(path_steps), INT, TRAINING, FIXED, "0",
     "with --consistency: learn from pictures that --model_weights draws in so many steps; 0: from pairs of timesteps",
     0, 1000},
    {FIELD(matching_fraction), FLOAT, TRAINING, FIXED, "0",
     "with --path_steps: in this last part of the steps match the distribution of pictures instead of paths",
     0, 0.9},
    {FIELD(min_snr_gamma), FLOAT, TRAINING, FIXED, "0",
     "weigh the loss by min-SNR: signal-to-noise ratios over this (5 is usual) count no more; 0: unweighted",
     0, 1e6},
    {FIELD(flip), BOOL, TRAINING, FIXED, "0", "mirror half of the images left to right"},
    {FIELD(offset_noise), FLOAT, TRAINING, FIXED, "0",
     "add this multiple of one normal a channel to the training noise, for very dark and bright pictures",
     0, 10},
    {FIELD(seed), INT, TRAINING, FIXED, "0", "seed of the weights, the order, the noise, and the first picture",
     0, 4294967295.0},
    {FIELD(log_every), INT, TRAINING, FREE, "50", "steps between two log lines", 1, 1e9},
    {FIELD(save_every), INT, TRAINING, FREE, "1000", "steps between checkpoints; 0: at the end",
     0, 1e9},
    {FIELD(keep), INT, TRAINING, FREE, "2", "newest checkpoints to keep", 1, 1e9},
    {FIELD(keep_every), INT, TRAINING, FREE, "0",
     "also keep every checkpoint whose step is a multiple of this; 0: none", 0, 1e9},
    {FIELD(sample_every), INT, TRAINING, FREE, "1000", "steps between grids; 0: at the end", 0, 1e9},
    {FIELD(val_every), INT, TRAINING, FREE, "1000", "steps between two validation losses", 1, 1e9},

    {FIELD(generate), BOOL, PICTURES, FORGOTTEN, "0",
     "draw --num_samples pictures and exit, with --model_weights or the newest checkpoint"},
    {FIELD(num_samples), INT, PICTURES, FREE, "16",
     "pictures to draw, and in each grid while training; 0: no grids", 0, 1e6},
    {FIELD(seeds), PATH, PICTURES, FORGOTTEN, "", "draw the seeds 0-63, or 3,7,10-12, and exit"},
    {"class", offsetof(Config, classes), sizeof Config().classes, PATH, PICTURES, FORGOTTEN, "",
     "classes to draw, such as cat,dog, equally many of each, or by number where they have no names: 0-4,7"},
    {FIELD(class_names), PATH, PICTURES, FORGOTTEN, "",
     "text file with a name of a class in each line, for a model that stores none, or other names"},
    {FIELD(show), BOOL, PICTURES, FORGOTTEN, "1", "show the grid of --generate in the terminal too"},

    {FIELD(guidance_scale), FLOAT, SAMPLING, FREE, "1",
     "strength of classifier-free guidance; 1: none, 2 to 4 are usual",
     0, 1000},
    {FIELD(sampler), CHOICE, SAMPLING, FREE, "ddim",
     "DDIM, DDPM (adds noise), DPM-Solver++(2M), Heun's (both second order); consistency: for models of --consistency",
     0, 0, "ddim|ddpm|dpmpp|heun|consistency"},
    {FIELD(sample_steps), INT, SAMPLING, FREE, "0",
     "steps a picture; 0: ddim 50, ddpm all, dpmpp and heun 25, consistency as tuned. A step is one call, heun's two",
     0, 100000},
    {FIELD(spacing), CHOICE, SAMPLING, FREE, "auto",
     "which timesteps; auto: uniform for ddim and ddpm, as tuned for consistency, else trailing; karras: as EDM",
     0, 0, "auto|uniform|trailing|karras"},
    {FIELD(eta), FLOAT, SAMPLING, FREE, "0", "how much of ddpm's noise ddim adds at every step",
     0, 1},
    {FIELD(threshold), CHOICE, SAMPLING, FREE, "clamp",
     "how steps keep pictures in [-1, 1]; dynamic is generate.py's",
     0, 0, "clamp|dynamic|none"},
    {FIELD(use_ema), INT, SAMPLING, FREE, "1",
     "draw and validate with this one of the averaged weights of --ema_rate, counted from 1; 0: the raw weights",
     0, 4},

    {FIELD(resume), PATH, OTHER, FORGOTTEN, "", "continue the newest checkpoint here, or in --out_dir"},
    {FIELD(gpus), INT, OTHER, FORGOTTEN, "1", "GPUs of this machine to train or draw with", 1, 64},
    {FIELD(processes), INT, OTHER, FORGOTTEN, "1", "processes to train or draw with, where there is no GPU", 1, 64},
    {FIELD(config), PATH, OTHER, FORGOTTEN, "",
     "take flags from this file, a line each: NAME = VALUE; flags typed come over it"},
    {FIELD(print_config), BOOL, OTHER, FORGOTTEN, "0", "print the flags as a --config file, and exit"},
    {FIELD(dry_run), BOOL, OTHER, FORGOTTEN, "0", "print plan, memory, a step's time; needs no data"},
    {FIELD(help), CHOICE, OTHER, FORGOTTEN, "none", "print the usual flags, or with all every flag, and exit",
     0, 0, "none|usual|all"},
};

// What guided-diffusion's models of ImageNet share.
#define OF_IMAGENET                                                                                   \
    "--class_cond 1 --num_classes 1000 --learn_sigma 1 --resblock_updown 1 --use_scale_shift_norm 1 " \
    "--attention_resolutions 32,16,8 --ema_rate 0.9999 "
// The recipe of docs/records.md: EDM (Karras et al. 2022) with a learning rate that falls to 0 within minutes.
#define OF_RECORDS                                                                                              \
    "--noise_schedule edm --predict edm --timestep_sampling lognormal --timestep_mean -1.2 --timestep_std 1.2 " \
    "--optimizer muon --lr_schedule cosine --warmup_steps 500 --grad_clip 1 --sampler dpmpp --sample_steps 20 "

// A preset is a text of flags that come before those of --config and those the user types.
struct Preset {
    const char *name, *flags;
};
static std::vector<Preset> PRESETS = {
    // 32 groups would leave one channel a group at this width: see check_levels
    {"tiny",
     "--data_file data/faces.bin --image_size 32 --num_channels 32 --channel_mult 1,2,2 "
     "--num_res_blocks 1 --attention_resolutions 8 --norm_groups 8 --predict flow --noise_schedule flow "
     "--timestep_sampling lognormal --batch_size 8 --optimizer muon --lr 1e-3 --lr_schedule cosine "
     "--warmup_steps 100 --ema_rate 0.995 --steps 4000 --sample_every 500"},
    {"small32", OF_RECORDS "--image_size 32 --channel_mult 1,2,2 --batch_size 64 --lr 3e-4"},
    {"fashion32", OF_RECORDS "--image_size 32 --in_channels 1 --channel_mult 1,2,2 --class_cond 1 --num_classes 10 "
                             "--cond_drop_prob 0.1 --batch_size 128 --lr 1e-3"},
    {"unet64", OF_RECORDS "--batch_size 64 --lr 3e-4 --steps 16000"},
    {"large64",
     "--num_channels 128 --num_res_blocks 3 --attention_resolutions 32,16,8 --num_head_channels 64 "
     "--noise_schedule cosine --batch_size 64 --warmup_steps 1000 --ema_rate 0.9999 --steps 200000 "
     "--save_every 5000 --sample_every 5000 --val_every 5000"},
    {"adm64", OF_IMAGENET
     "--num_channels 192 --num_res_blocks 3 --num_head_channels 64 --noise_schedule cosine --dropout 0.1"},
    {"adm128", OF_IMAGENET "--image_size 128 --num_channels 256 --channel_mult 1,1,2,3,4 --num_heads 4 "
                           "--use_new_attention_order 0"},
    {"adm256",
     OF_IMAGENET "--image_size 256 --num_channels 256 --channel_mult 1,1,2,2,4,4 --num_head_channels 64 "
                 "--use_new_attention_order 0"},
    {"consistency", "--consistency 1 --path_steps 10 --matching_fraction 0.2 --optimizer muon --lr 3e-4 "
                    "--lr_schedule cosine --warmup_steps 100 --grad_clip 1 --batch_size 32 --steps 16000"},
};

// Whether a flag stands for several others: --preset, and --model of dev/dit.
static bool is_preset(const Flag& flag) { return contains({"preset", "model"}, flag.name); }

// How many letters two words share at the beginning and at the end.
static ptrdiff_t shared_letters(const std::string& a, const std::string& b) {
    auto first = std::ranges::mismatch(a, b).in1 - a.begin();
    auto last = std::mismatch(a.rbegin(), a.rend(), b.rbegin(), b.rend()).first - a.rbegin();
    return first + last;
}

// The entry of a table (FLAGS, PRESETS) that has this name. Where there is none, the message calls it `shown`, and
// suggests the most similar entry, written as mark + its name.
static const auto& named(const auto& table, const std::string& name, const std::string& shown, const char* mark) {
    for (const auto& entry : table)
        if (name == entry.name) return entry;

    auto similarity = [&](const auto& entry) { return shared_letters(name, entry.name); };
    auto similar = std::ranges::max_element(table, {}, similarity);
    fail_usage("there is no %s; did you mean %s%s? (--help all lists every flag)", shown, mark, similar->name);
}

static const Flag& flag_named(const std::string& name) { return named(FLAGS, name, "flag --" + name, "--"); }
static const char* preset_flags(const std::string& name) {
    return named(PRESETS, name, "preset '" + name + "'", "").flags;
}

static std::string trimmed(const std::string& line) {
    size_t first = line.find_first_not_of(" \t\r");
    if (first == std::string::npos) return "";
    size_t last = line.find_last_not_of(" \t\r");
    return line.substr(first, last + 1 - first);
}

static double parse_bool(const Flag& flag, const std::string& value) {
    if (value == "0" || value == "false" || value == "False") return 0;
    if (value == "1" || value == "true" || value == "True") return 1;

    std::string remedy;
    if (flag.name == std::string("generate")) remedy = "; the number of pictures is --num_samples " + value;
    fail_usage("--%s is 0 or 1, not '%s'%s", flag.name, value, remedy);
}

static double parse_choice(const Flag& flag, const std::string& value) {
    int choice = index_of(split(flag.choices, '|'), value);
    if (choice < 0) fail_usage("--%s is one of %s, not '%s'", flag.name, flag.choices, value);
    return choice;
}

// The number that a value stands for. That of a word is its place among the choices.
static double parse_number(const Flag& flag, const std::string& value) {
    if (flag.kind == BOOL) return parse_bool(flag, value);
    if (flag.kind == CHOICE) return parse_choice(flag, value);

    char* end;
    double number = strtod(value.c_str(), &end);
    bool is_float = flag.kind == FLOAT;
    bool is_number = !value.empty() && !*end && (is_float || number == floor(number));
    bool in_range = number >= flag.least && number <= flag.most;
    const char* kind = is_float ? "number (a float)" : "whole number";
    if (!is_number || !in_range)
        fail_usage("--%s needs a %s between %g and %.10g, not '%s'", flag.name, kind, flag.least, flag.most, value);

    bool is_lost = number != 0 && fabs(number) < FLT_MIN;  // as a float it is 0 or lacks digits
    if (is_lost)
        fail_usage("--%s is %s, it must be 0 or at least 1.2e-38, the least float above it", flag.name, value);
    return number;
}

// A path must have room in Config, and in a line of a configuration file.
static void check_path(const Flag& flag, const std::string& value) {
    if (value.size() >= flag.size) fail_usage("--%s is longer than %zu characters", flag.name, flag.size - 1);
    if (value.empty() && *flag.standard) fail_usage("--%s needs a value, not ''", flag.name);
    bool is_broken = value.find_first_of("\r\n\0", 0, 3) != value.npos;
    if (is_broken || value.starts_with('"') || value != trimmed(value))
        fail_usage("--%s must not hold a line break, begin with a quote or begin or end with a blank",
                   flag.name);
}

// A flag that is no path is a number, or a list of them. A list that is shorter than its array in Config is ended by
// a 0. No whole number is below 0.
static void set_flag(Config* config, const Flag& flag, const std::string& value) {
    void* place = (char*)config + flag.offset;
    if (flag.kind == PATH) {
        check_path(flag, value);
        strcpy((char*)place, value.c_str());
        return;
    }

    size_t most = flag.size / sizeof(float);
    Strings parts = {value};
    if (most > 1) parts = split(value, ',');
    if (parts.size() > most)
        fail_usage("--%s takes at most %zu numbers: '%s'", flag.name, most, value);

    memset(place, 0, flag.size);
    for (size_t i = 0; i < parts.size(); i++) {
        double number = parse_number(flag, parts[i]);
        if (number == 0 && parts.size() > 1)
            fail_usage("--%s %s: a 0 stands alone, for none", flag.name, value);

        if (flag.kind == FLOAT) ((float*)place)[i] = (float)number;
        else ((uint32_t*)place)[i] = (uint32_t)number;
    }
}

// The value as it would be typed.
static std::string flag_text(const Config& config, const Flag& flag) {
    const void* place = (const char*)&config + flag.offset;
    if (flag.kind == PATH) return (const char*)place;

    std::string joined;
    for (size_t i = 0; i < flag.size / sizeof(float); i++) {
        double number;
        if (flag.kind == FLOAT) number = ((const float*)place)[i];
        else number = ((const uint32_t*)place)[i];
        if (i && number == 0) break;  // the list ends

        if (i) joined += ",";
        if (flag.kind == CHOICE) joined += split(flag.choices, '|')[(size_t)number];
        else if (flag.kind == FLOAT) joined += float_text((float)number);
        else joined += text("%.0f", number);
    }
    return joined;
}

static Config default_config() {
    Config config = Config();
    for (const Flag& flag : FLAGS) set_flag(&config, flag, flag.standard);
    return config;
}

// ---- flags as they are typed ------------------------------------------------------------------------------
#ifndef NETWORK_ONLY
// The flags that most runs need: `--help` tells these, `--help all` every one.
static const Strings USUAL_FLAGS = {
    "preset",       "data_file",  "val_file", "model_weights",  "out_dir", "image_size",   "num_channels",
    "channel_mult", "class_cond", "predict",  "noise_schedule", "flip",    "batch_size",
    "steps",        "lr",         "ema_rate", "seed",           "class",   "guidance_scale", "generate",
    "num_samples",  "seeds",      "sampler",  "sample_steps",   "resume",  "gpus",         "dry_run"};

static void print_help(bool all) {
    const char* which = all ? "" : " These are the usual ones:";
    printf(
        "%1$s: trains a %2$s diffusion model on images\n\n"
        "  ./%1$s --data_file X.bin     train (X.bin: python3 prepare_data.py --data_dir D "
        "--output_name X.bin)\n"
        "  ./%1$s --resume              continue\n"
        "  ./%1$s --generate            draw pictures with the newest checkpoint\n"
        "  ./%1$s --help all            every flag, and what each preset stands for\n\n"
        "Flags are written --name value or --name=value.%3$s\n",
        network.program, network.name, which);

    int group = -1;
    for (const Flag& flag : FLAGS) {
        if (!all && !contains(USUAL_FLAGS, flag.name)) continue;
        if (flag.group != group) printf("\n%s\n", GROUP_TITLES[flag.group]);
        group = flag.group;

        std::string left = text("--%s %s", flag.name, flag.kind == CHOICE ? flag.choices : "");
        std::string standard;
        bool is_off = flag.kind == BOOL && *flag.standard == '0';
        if (*flag.standard && !is_off) standard = text(" (default %s)", flag.standard);
        print("  %-37s %s%s\n", left, flag.help, standard);
    }

    printf("\nPresets\n");
    for (auto [name, flags] : PRESETS) {
        if (all) printf("  %s: %s\n", name, flags);
        else printf("  %s", name);
    }
    if (!all) printf("\n");
}

// A flag that was given. `origin` says where, if it was not typed: "--preset tiny" or "my.txt, line 3".
struct GivenFlag {
    const Flag* flag;
    std::string value, origin;
};
typedef std::vector<GivenFlag> GivenFlags;

// The flag of this name that counts, which is the last one; null where none was given.
static const GivenFlag* was_given(const GivenFlags& given, const std::string& name) {
    const GivenFlag* last = nullptr;
    for (const GivenFlag& g : given)
        if (name == g.flag->name) last = &g;
    return last;
}

// The same, where it was typed, and does not come from a preset or a file.
static const GivenFlag* was_typed(const GivenFlags& given, const char* name) {
    const GivenFlag* last = was_given(given, name);
    if (!last || !last->origin.empty()) return nullptr;
    return last;
}

static void apply_flags(Config* config, const GivenFlags& given) {
    for (const GivenFlag& g : given) set_flag(config, *g.flag, g.value);
    config->resume_given = was_given(given, "resume") != nullptr;
    if (*config->resume) strcpy(config->out_dir, config->resume);  // a run stays in its folder
}

// A model of --consistency draws by the sampler of this name, unless another is given.
static void choose_sampler(Config* config, const GivenFlags& given) {
    if (config->consistency && !was_given(given, "sampler")) config->sampler = SAMPLER_CONSISTENCY;
}

// A note for each flag that was typed and does nothing, for want of another flag.
static Strings idle_flags(const Config& c, const GivenFlags& given) {
    struct Need {
        const char *flag, *other;
        bool is_met;
    };
    bool is_lognormal = c.timestep_sampling == TIMESTEPS_LOGNORMAL;
    const Need needs[] = {
        {"timestep_mean", "without --timestep_sampling lognormal", is_lognormal},
        {"timestep_std", "without --timestep_sampling lognormal", is_lognormal},
        {"timestep_sampling", "with --path_steps", !c.path_steps || *c.val_file},
        {"flip", "with --path_steps", !c.path_steps},
        {"offset_noise", "with --path_steps", !c.path_steps},
        {"cond_drop_prob", "without --class_cond 1", !!c.class_cond},
        {"num_classes", "without --class_cond 1", !!c.class_cond},
        {"final_lr_fraction", "with --lr_schedule constant", c.hyper.lr_schedule != LR_CONSTANT},
        {"consistency_steps", "without --consistency 1", !!c.consistency},
        {"output_name", "without --generate", !!c.generate},
    };
    Strings notes;
    for (const Need& need : needs) {
        const Flag& flag = flag_named(need.flag);
        bool is_usual = flag_text(c, flag) == flag.standard;
        if (!need.is_met && !is_usual && was_typed(given, need.flag))
            notes.push_back(text("--%s does nothing %s", need.flag, need.other));
    }

    bool is_typed = was_typed(given, "warmup_steps") || was_typed(given, "steps");
    if (is_typed && c.hyper.warmup_steps > c.steps)
        notes.push_back(text("the learning rate does not reach --lr: --warmup_steps %d are more than --steps %d",
                             c.hyper.warmup_steps, c.steps));
    if (c.path_steps && is_guided(c))
        notes.push_back(text("--guidance_scale %g guides the grids alone, and not what the network learns from",
                             c.guidance_scale));
    return notes;
}

// The flags that only other programs of the repository have.
struct OtherProgram {
    const char* name;
    Strings flags;
};
static const std::vector<OtherProgram> OTHER_PROGRAMS = {
    {"generate.py",
     {"init_image", "strength", "mask", "jump_length", "jump_n_sample", "interpolate", "strip", "guide_weights",
      "guidance_interval", "threshold dynamic", "nearest", "quality", "export", "export_page", "import"}},
    {"train_unet.py", {"compile", "device", "init", "operators", "precision"}},
    {"prepare_data.py", {"data_dir", "fit", "labels", "val_fraction"}}};

static void refuse_elsewhere(const std::string& name) {
    for (const OtherProgram& program : OTHER_PROGRAMS)
        if (contains(program.flags, name))
            fail_usage("--%s is %s's: python3 %s --help tells how it is used", name, program.name, program.name);
}

// The flags of a configuration. A line is NAME VALUE or NAME = VALUE; one that begins with # is a comment. Messages
// call the configuration `path`.
static GivenFlags parse_config(const std::string& lines, const std::string& path) {
    GivenFlags given;
    Config scratch;  // each flag is set in it once, so that a bad value is named with its line
    int number = 0;
    for (const std::string& line : split(lines, '\n')) {
        number++;
        std::string origin = text("%s, line %d", path, number);
        std::string words = trimmed(line);
        if (words.empty() || words[0] == '#') continue;

        std::string name = words.substr(0, words.find_first_of(" \t="));
        std::string value = trimmed(words.substr(name.size()));
        if (value.starts_with('=')) value = trimmed(value.substr(1));

        std::string why = failure_of([&] {
            refuse_elsewhere(name);
            const Flag& flag = flag_named(name);
            if (flag.group == OTHER) fail_usage("%s can only be typed, as --%s", flag.name, flag.name);
            set_flag(&scratch, flag, value);
            if (is_preset(flag)) preset_flags(value);
            given.push_back({&flag, value, origin});
        });
        if (!why.empty()) fail_usage("%s: %s", origin, why);
    }
    return given;
}

static GivenFlags read_config_file(const std::string& path) {
    std::string contents = read_typed_text(path);
    if (contents.find('\0') != std::string::npos)
        fail("%s is no configuration: --config takes a text, a line each: NAME = VALUE", path);
    return parse_config(contents, path);
}

static std::string config_line(const Flag& flag, const std::string& value) {
    return std::string(flag.name) + " = " + value + "\n";
}

// Every setting as a file that --config reads, under the titles of --help.
static std::string config_text(const Config& config) {
    std::string lines = text(
        "# Flags of %s, read with --config FILE; flags typed beside it come over these.\n", network.program);
    int group = -1;
    for (const Flag& flag : FLAGS) {
        if (flag.group == OTHER) break;
        if (flag.group != group) lines += text("\n# %s\n", GROUP_TITLES[flag.group]);
        group = flag.group;
        if (!is_preset(flag)) lines += config_line(flag, flag_text(config, flag));
    }
    return lines;
}

// The flag that words[*at] begins. Its value may be the next word, and then *at moves on to that.
static GivenFlag parse_flag(const Strings& words, size_t* at, const std::string& origin) {
    std::string argument = words[*at] == "-h" ? "--help" : words[*at];
    if (!argument.starts_with("--"))
        fail_usage("'%s' is not a flag; flags are written --name value (see --help)", argument);

    size_t equals = argument.find('=');
    std::string name = argument.substr(2, equals - 2);
    refuse_elsewhere(name);
    const Flag& flag = flag_named(name);

    // The value may be left out of a flag that says yes or no, such as --flip, of --resume and of --help. A word that
    // begins with -- is the next flag; a value that begins so is written --name=--value.
    bool is_optional = flag.kind == BOOL || name == "resume" || name == "help";
    bool has_equals = equals != std::string::npos;
    bool has_next = *at + 1 < words.size() && !words[*at + 1].starts_with("--");
    std::string value;
    if (has_equals) value = argument.substr(equals + 1);
    else if (has_next) value = words[++*at];
    else if (flag.kind == BOOL) value = "1";
    else if (name == "help") value = "usual";

    // A script types '' where its variable is not set. Only --val_file '' means something: it takes back what a
    // checkpoint tells.
    bool takes_back = name == "val_file" && (has_equals || has_next);
    if (value.empty() && !is_optional && !takes_back)
        fail_usage("--%s needs a value, not ''; leave it out for what is usual", name);
    return {&flag, value, origin};
}

// Every flag of a command line. A later one overrides those before it: first come a preset's flags, then those of the
// --config file, then the typed ones.
static GivenFlags parse_flags(const Strings& words, const std::string& origin = "") {
    GivenFlags given;
    for (size_t i = 0; i < words.size(); i++) given.push_back(parse_flag(words, &i, origin));

    auto put_first = [&](const GivenFlags& more) { given.insert(given.begin(), more.begin(), more.end()); };
    if (const GivenFlag* file = was_given(given, "config")) put_first(read_config_file(file->value));

    for (const Flag& flag : FLAGS) {
        if (!is_preset(flag)) continue;
        const GivenFlag* preset = was_given(given, flag.name);
        if (!preset) continue;

        for (const GivenFlag& other : given) {
            bool is_rival = other.flag == &flag && other.origin == preset->origin && other.value != preset->value;
            if (!is_rival) continue;
            fail_usage("--%s %s and --%s %s: only one can be had", flag.name, other.value, flag.name, preset->value);
        }
        std::string source = text("--%s %s", flag.name, preset->value);
        put_first(parse_flags(split(preset_flags(preset->value), ' '), source));
    }
    return given;
}
#endif  // NETWORK_ONLY

// ---- what is refused --------------------------------------------------------------------------------------
static void check_attention(const Config& c, int width, int size) {
    if (size > MAX_ATTENTION_SIZE)
        fail("attention at %d pixels does not fit; use more levels or other --attention_resolutions", size);
    for (bool decoder : {false, true}) {
        int heads = heads_of(c, width, decoder);
        int divisor = c.num_heads ? heads : c.num_head_channels;
        const char* flag = c.num_heads ? "num_heads" : "num_head_channels";
        if (width % divisor)
            fail("--%s %d does not divide the %d channels of the attention at %dx%d", flag, divisor, width, size, size);

        auto [multiple, most] = head_channels();
        int channels = width / heads;
        const char* where = most < 256 ? " in fp32, here" : "";
        if (channels % multiple || channels > most)
            fail("attention has heads of %d channels, and a GPU takes multiples of %d up to %d%s; use another "
                 "--num_head_channels",
                 channels, multiple, most, where);
    }
}

static void check_levels(const Config& c) {
    int levels = list_length(c.channel_mult);  // 0 for a network that is no UNet, whose make_plan checks its own flags
    int multiple = 1 << levels >> 1;           // every level but the last halves the image
    if (levels && c.image_size % multiple)
        fail("--image_size %d can't be halved for %d levels of --channel_mult; use a multiple of %d",
             c.image_size, levels, multiple);
    if (c.num_heads_upsample && !c.num_heads)
        fail("--num_heads_upsample %d does nothing without --num_heads", c.num_heads_upsample);

    for (int i = 0; i < levels; i++) {
        int width = level_width(c, i);
        int size = c.image_size >> i;
        if (width > 8192 || fmodf((float)c.num_channels * c.channel_mult[i], 32) != 0)
            fail("--channel_mult %s times --num_channels %d is no multiple of 32 up to 8192",
                 float_text(c.channel_mult[i]), c.num_channels);
        if (width % c.norm_groups || width / c.norm_groups < 2)
            fail("--norm_groups %d must divide level %d's %d channels into groups of 2 or more, or else the norm takes the "
                 "time embedding away; use 16",
                 c.norm_groups, i + 1, width);

        bool is_middle = i == levels - 1;  // which always has attention
        if (is_middle || attends(c, size)) check_attention(c, width, size);
    }
}

static void check_schedule(const Config& c) {
    bool is_flow = c.noise_schedule == SCHEDULE_FLOW;
    if (c.noise_schedule == SCHEDULE_LINEAR && c.diffusion_steps <= 20)
        fail("--diffusion_steps %d is too few for a linear schedule; use 21 or more, or cosine", c.diffusion_steps);
    if (c.zero_terminal_snr && (is_flow || c.noise_schedule == SCHEDULE_EDM))
        fail("--zero_terminal_snr rescales --noise_schedule linear and cosine only");

    const char* ends_in_noise = is_flow ? "--noise_schedule flow" : "--zero_terminal_snr";
    const char* remedy = is_flow ? "flow" : "x0";
    if ((c.zero_terminal_snr || is_flow) && c.predict == PREDICT_EPS)
        fail("%s ends in noise alone, where --predict eps fails; use --predict v or %s", ends_in_noise, remedy);
}

static void check_consistency(const Config& c) {
    if (c.consistency && c.predict == PREDICT_EPS)
        fail("--consistency needs a network that sees an image in noise alone: not one of --predict eps");

    if (c.path_steps && !c.consistency) fail("--path_steps %d goes with --consistency 1 only", c.path_steps);
    if (c.path_steps > c.diffusion_steps)
        fail("--path_steps %d is more than --diffusion_steps %d", c.path_steps, c.diffusion_steps);

    bool takes_learned = c.consistency && c.path_steps && c.sampler == SAMPLER_CONSISTENCY && c.spacing == SPACING_AUTO;
    if (takes_learned && c.sample_steps > c.consistency_steps)
        fail("--sample_steps %d is more than --consistency_steps %d, in which the model learns to draw", c.sample_steps,
             c.consistency_steps);
    if (c.path_steps && c.path_steps < c.consistency_steps)
        fail("--path_steps %d is less than --consistency_steps %d", c.path_steps, c.consistency_steps);

    if (c.matching_fraction > 0 && !c.path_steps)
        fail("--matching_fraction %g needs --path_steps", c.matching_fraction);
    const char* other_loss = c.learn_sigma ? "--learn_sigma" : "--min_snr_gamma";
    if (c.consistency && (c.learn_sigma || c.min_snr_gamma > 0))
        fail("--consistency has a loss of its own, without %s", other_loss);
}

// Refuses, in a sentence, what can't work. Everything behind it may rely on what it lets through.
static void check_config(const Config& c) {
    if (c.num_channels % 32) fail("--num_channels must be a multiple of 32, not %d", c.num_channels);
    check_levels(c);

    if (c.class_cond && !c.num_classes)
        fail("--class_cond needs labels: make images with prepare_data.py --labels, or name --num_classes");
    bool can_be_guided = c.class_cond && c.cond_drop_prob > 0;
    if (is_guided(c) && !can_be_guided)
        fail("--guidance_scale %g needs a model with --class_cond and --cond_drop_prob; generate.py can guide "
             "others by --guide_weights",
             c.guidance_scale);
    if (c.use_ema > std::max(1, ema_count(c)))
        fail("--use_ema %d asks for an average of the weights that does not exist: --ema_rate makes %d; 0 takes the raw "
             "weights",
             c.use_ema, ema_count(c));

    check_schedule(c);
    check_consistency(c);

    if (c.eta > 0 && c.sampler != SAMPLER_DDIM)
        fail("--eta %g goes with --sampler ddim only; use --eta 0", c.eta);
    if (c.sample_steps > c.diffusion_steps)
        fail("--sample_steps %d is more than --diffusion_steps %d", c.sample_steps, c.diffusion_steps);
}

#ifndef NETWORK_ONLY
// ---- images -----------------------------------------------------------------------------------------------
// The images of a .bin in memory, planar (N, C, H, W): bytes or floats, as they are.
struct Dataset {
    int count = 0;  // images
    std::vector<uint8_t> bytes = {};
    std::vector<float> floats = {};
    float largest = 1;             // absolute value of a pixel, if that is more than 1
    std::vector<int> labels = {};  // (N), where there are classes
    Strings class_names = {};      // which they number; some may have no image
    std::string checksum = "";     // the file's, in hexadecimal digits; old ones have none

    // A value of a pixel. Bytes become -1 to 1; floats are what they are.
    float value(size_t i) const {
        if (bytes.empty()) return floats[i];
        return (float)bytes[i] / 127.5f - 1.0f;
    }
};

enum { IMAGES_MAGIC = 20240620, IMAGES_VERSION = 1, IMAGES_CHECKSUM_FIELD = 9 };
enum { IMAGES_UINT8 = 1, IMAGES_FLOAT = 2 };  // types of elements

// The sums of values over blocks of factor x factor pixels, of images of this width.
template <typename T> static std::vector<float> block_sums(const std::vector<T>& values, int width, int factor) {
    std::vector<float> sums(values.size() / factor / factor);
    for (size_t i = 0; i < values.size(); i++) {
        size_t row = i / width / factor;
        size_t column = i % width / factor;
        sums[row * (width / factor) + column] += (float)values[i];
    }
    return sums;
}

// Averages images of this width over blocks of factor x factor pixels.
static void shrink(Dataset* data, int width, int factor) {
    float pixels = (float)(factor * factor);
    if (data->bytes.empty()) {
        data->floats = block_sums(data->floats, width, factor);
        for (float& value : data->floats) value = value / pixels;
    } else {
        data->floats = block_sums(data->bytes, width, factor);
        for (float& value : data->floats) value = value / (127.5f * pixels) - 1.0f;
        data->bytes = std::vector<uint8_t>();
    }
}

// Refuses names that can't be stored: what is no text in UTF-8, an empty one, and two that are the same.
static void check_class_names(const Strings& names, const std::string& file) {
    std::set<std::string> seen;
    for (const std::string& name : names) {
        if (name.find('\0') != name.npos || !is_utf8(name))
            fail("%s has names of classes that are no text in UTF-8", file);
        if (name.empty()) fail("%s has a class without a name", file);
        if (!seen.insert(name).second) fail("%s has two classes called %s", file, name);
    }
}

// The names of classes in a file, each ended by a line feed: from `least` to `most` of them.
static Strings parse_class_names(const std::string& lines, const std::string& file, size_t least, size_t most) {
    size_t count = std::ranges::count(lines, '\n');
    if (count < least || count > most || !(lines.empty() || lines.ends_with('\n')))
        fail("%s is damaged: it has %zu names of classes for %zu classes", file, count, most);
    Strings names = split(lines, '\n');
    names.pop_back();  // what follows the last line feed
    check_class_names(names, file);
    return names;
}

// What an image file says of itself: fields 1 to 8 of its header, see docs/formats.md. Version 0 has only four of them.
struct ImageHeader {
    int32_t N, C, H, W, version, type, classes, name_bytes;
};

static ImageHeader image_header(const Reader& in) {
    const std::string& name = in.path;
    if (in.size < HEADER_BYTES || in.header[0] != IMAGES_MAGIC)
        fail("%s is no image file, a .bin that prepare_data.py makes of pictures", name);
    ImageHeader h;
    memcpy(&h, in.header + 1, sizeof h);
    if (!h.version) h = {h.N, h.C, h.H, h.W, 0, IMAGES_FLOAT, 0, 0};
    bool is_known_version = h.version == 0 || h.version == IMAGES_VERSION;
    bool is_known_type = h.type == IMAGES_UINT8 || h.type == IMAGES_FLOAT;
    if (!is_known_version || !is_known_type)
        fail("%s has version %d and elements of type %d, which this program can't read; make it again with prepare_data.py",
             name, h.version, h.type);

    // a double can hold what 64 bits can't, and is exact enough to refuse it
    double pixel_bytes = (double)h.N * h.C * h.H * h.W * (h.type == IMAGES_UINT8 ? 1 : 4);
    double label_bytes = h.classes ? 4.0 * h.N : 0;
    double claimed = HEADER_BYTES + pixel_bytes + label_bytes + h.name_bytes;
    bool is_possible = std::min({h.N, h.C, h.H, h.W}) >= 1 && std::min(h.classes, h.name_bytes) >= 0;
    if (!is_possible || claimed != (double)in.size)
        fail("%s is damaged: its header's %d images of %d x %d x %d ask for %.0f bytes and it has %zu", name, h.N,
             h.C, h.H, h.W, claimed, in.size);
    return h;
}

// The names of the classes of an image file; none where it has no labels.
static Strings read_class_names(const std::string& path) {
    Reader in(path);
    ImageHeader h = image_header(in);
    in.seek(in.size - h.name_bytes);
    return parse_class_names(in.take<std::string>(h.name_bytes), path, h.classes, h.classes);
}

// Refuses a path where there is no image file, and says how to make one.
static void check_image_path(const std::string& path, int image_size) {
    if (!file_exists(path) && file_exists(path + ".gz"))
        fail("%s is still packed; run `make data` (or gzip -dk %s.gz)", path, path);
    if (!file_exists(path))
        fail("no file %s; make it: python3 prepare_data.py --data_dir FOLDER --image_size %d --output_name %s", path,
             image_size, shell_word(path));
    if (is_folder(path))
        fail("%s is a folder; make a file of its pictures: python3 prepare_data.py --data_dir %s --output_name FILE.bin", path,
             shell_word(path));
}

// Reads the images of a file. Those whose size is a multiple of image_size are shrunk to it, others refused.
static Dataset read_images(const std::string& path, const Config& c) {
    check_image_path(path, c.image_size);
    Reader in(path);
    ImageHeader h = image_header(in);
    Dataset data = {.count = h.N};
    if (h.version) data.checksum = text("%08x", in.header[IMAGES_CHECKSUM_FIELD]);
    if (h.version && !in.checksum_matches(IMAGES_CHECKSUM_FIELD))
        fail("%s is damaged: its checksum does not match; make it again with prepare_data.py", path);

    if (h.C != c.in_channels)
        fail("%s has images of %d channels, and %d are wanted", path, h.C, c.in_channels);
    if (h.H != h.W || h.H % c.image_size)
        fail("%s holds %d x %d images; prepare_data.py --image_size %d --output_name NEW.bin makes what fits",
             path, h.H, h.W, c.image_size);
    int factor = h.H / c.image_size;
    double shrunk_bytes = factor > 1 ? 4.0 * h.N * h.C * c.image_size * c.image_size : 0;
    check_host_memory((double)in.size + shrunk_bytes, "the images of " + path, "use fewer or smaller ones");

    size_t count = (size_t)h.N * h.C * h.H * h.W;
    in.seek(HEADER_BYTES);
    if (h.type == IMAGES_UINT8) data.bytes = in.take<std::vector<uint8_t>>(count);
    else data.floats = in.take<std::vector<float>>(count);

    float most = h.version ? FLT_MAX : 1.001f;
    for (float value : data.floats) {
        bool is_pixel = fabsf(value) <= most;  // a NaN is none
        if (!is_pixel) fail("%s is damaged: it holds a pixel of %g", path, value);
        data.largest = std::max(data.largest, fabsf(value));
    }

    data.labels = in.take<std::vector<int>>(h.classes ? h.N : 0);
    for (int label : data.labels)
        if (label < 0 || label >= h.classes)
            fail("%s is damaged: it holds a label of %d and %d classes", path, label, h.classes);
    data.class_names = read_class_names(path);

    if (factor > 1) shrink(&data, h.W, factor);
    return data;
}

// Numbers the labels of images as the model does, whose classes have these names. A class that the model does not
// know is refused. Returns a sentence about what else differs, or "" where nothing does. With `trains` it also names
// classes of the model that have no images.
static std::string match_classes(Dataset* data, const char* file, const Strings& names, bool trains) {
    const Strings theirs = std::exchange(data->class_names, names);
    std::vector<int> images(theirs.size()), to(theirs.size());
    for (int label : data->labels) images[label]++;

    Strings unknown;
    std::string difference;
    for (int i = 0; i < (int)theirs.size(); i++) {
        to[i] = index_of(names, theirs[i]);
        if (!images[i] || to[i] == i) continue;
        if (to[i] < 0) unknown.push_back(theirs[i]);
        else if (difference.empty())
            difference = text(" numbers its classes otherwise and is matched by their names: %s is number %d there and "
                              "%d in the model", theirs[i], i, to[i]);
    }
    if (!unknown.empty())
        fail("%s has images of %s, which the model does not know: its classes are %s", file, listed(unknown),
             listed(names));

    Strings lacking;
    for (const std::string& name : names) {
        int i = index_of(theirs, name);
        if (i < 0 || (trains && !images[i])) lacking.push_back(name);
    }
    if (!lacking.empty()) {
        if (!difference.empty()) difference += "; it";
        difference += text(" has no images of %s, which the model knows", listed(lacking));
    }

    for (int& label : data->labels) label = to[label];
    if (difference.empty()) return "";
    return file + difference;
}

// ---- weights and checkpoints ------------------------------------------------------------------------------
// The header is 256 int32: these fields, and from SECTION_TABLE on the name and the length of each section.
enum HeaderField {
    FIELD_MAGIC,
    FIELD_VERSION,
    FIELD_CHECKSUM,
    FIELD_SECTIONS,
    FIELD_STEP,
    FIELD_PARAMETERS,
    FIELD_TENSORS,
    FIELD_SMOOTHED,  // the bits of a float
    FIELD_LR_STEPS,  // the length of the learning rate's schedule, which has no flag
    FIELD_SECTION_TABLE = 128
};
enum { WEIGHTS_VERSION = 3, OLD_WEIGHTS_MAGIC = 12345678 };
enum { SECTION_INTS = 8, SECTION_NAME_BYTES = 24, MAX_SECTIONS = 16 };

// The sections of parameters, in their order. The value of --use_ema is the number of one of them.
static const char* const ARRAY_SECTIONS[] = {"weights", "ema", "ema_2", "ema_3", "ema_4", "adam_m", "adam_v", "teacher",
                                             "fake", "fake_m", "fake_v"};

// --skip_outliers compares a step with the last WINDOW steps. No step is skipped before there are WINDOW_LEAST.
enum { WINDOW = 128, WINDOW_LEAST = 32 };
struct History {      // the section `state` of a checkpoint
    int32_t skipped;  // how many steps were skipped
    int32_t seen;     // how many were not, and were entered below: the n-th in place n mod WINDOW
    float losses[WINDOW], norms[WINDOW];
};

struct Section {
    size_t offset, bytes;
};

// What a weights file says of itself, checked against its length. The parameters are read later.
struct WeightsFile {
    std::string path;
    Config config;  // the default one with what the file stores
    long step = 0;
    float smoothed = 0;
    History history = History();
    std::map<std::string, Section> sections = {};  // by name
    Strings class_names = {};                      // of its first classes, by number; none: not known
    std::string data_checksum = "";                // of the images that it was trained on, where known
};

// The text of the section `config`: the flags that a checkpoint stores, a line each as in config.txt, by name.
static std::string stored_config(const Config& config) {
    std::set<std::string> lines;
    for (const Flag& flag : FLAGS) {
        std::string value = flag_text(config, flag);
        if (flag.on_resume != FORGOTTEN && !value.empty()) lines.insert(config_line(flag, value));
    }

    std::string joined;
    for (const std::string& line : lines) joined += line;
    return joined;
}

static void read_stored_config(Config* config, const std::string& lines) {
    GivenFlags stored = parse_config(lines, "config");
    for (const GivenFlag& g : stored) {
        if (g.flag->on_resume == FORGOTTEN) fail("no checkpoint stores --%s", g.flag->name);
        set_flag(config, *g.flag, g.value);
    }
    choose_sampler(config, stored);
}

// Where each section lies: they follow the header and each other up to the file's end.
static void read_section_table(WeightsFile* file, const int32_t* header, size_t size) {
    int count = header[FIELD_SECTIONS];
    bool fits = count >= 1 && count <= MAX_SECTIONS;
    size_t offset = HEADER_BYTES;
    for (int i = 0; fits && i < count; i++) {
        const char* entry = (const char*)(header + FIELD_SECTION_TABLE + i * SECTION_INTS);
        char name[SECTION_NAME_BYTES + 1] = {0};
        uint64_t bytes;
        memcpy(name, entry, SECTION_NAME_BYTES);
        memcpy(&bytes, entry + SECTION_NAME_BYTES, sizeof bytes);

        bool is_new = file->sections.insert({name, {offset, (size_t)bytes}}).second;
        fits = is_new && bytes <= size - offset;
        offset += bytes;
    }
    if (!fits || offset != size)
        fail("%s is damaged or was cut short: the sections that its header names don't fit its %zu bytes",
             file->path, size);
}

static void read_history(WeightsFile* file, const std::string& state) {
    if (state.empty()) return;
    History* h = &file->history;
    bool makes_sense = state.size() == sizeof *h;
    if (makes_sense) {
        memcpy(h, state.data(), sizeof *h);
        bool counts_steps = h->skipped >= 0 && h->seen >= 0 && (long)h->skipped + h->seen <= file->step;
        makes_sense = counts_steps && all_finite(h->losses, WINDOW) && all_finite(h->norms, WINDOW);
    }
    if (!makes_sense) fail("%s is damaged: its section state makes no sense", file->path);
}

// The failure with which a weights file of an earlier format is refused.
struct EarlierFormat : Failure {};

// Refuses what is no weights file of this program's network and of today's format.
static void check_format(const Reader& in) {
    const std::string& name = in.path;
    std::string word = shell_word(in.path);
    int magic = in.header[FIELD_MAGIC];
    int version = in.header[FIELD_VERSION];
    if (magic == IMAGES_MAGIC)
        fail("%s holds images; weights were expected (images go to --data_file)", name);
    if (magic == OLD_WEIGHTS_MAGIC)
        throw EarlierFormat({1, printable(text("%s has the first format; python3 generate.py --import %s --export NEW.bin "
                                               "makes today's",
                                               name, word))});
    if (in.size < HEADER_BYTES || magic != network.magic)
        fail("%s is no weights file of a %s (of .pt and .safetensors %s makes one)", name,
             network.name, network.importer);
    if (version >= 1 && version < WEIGHTS_VERSION)
        throw EarlierFormat({1, printable(text("%s has version %d of the format; python3 generate.py --import %s --export %s "
                                               "makes it today's and keeps all that it holds",
                                               name, version, word, word))});
    if (version != WEIGHTS_VERSION)
        fail("%s has version %d of the weights format; this program reads version %d", name, version,
             WEIGHTS_VERSION);
}

// The contents of a section, "" where the file has none of this name.
static std::string read_section(Reader* in, const WeightsFile& file, const std::string& name) {
    auto section = file.sections.find(name);
    if (section == file.sections.end()) return "";
    auto [offset, bytes] = section->second;
    in->seek(offset);
    return in->take<std::string>(bytes);
}

static WeightsFile open_weights(const std::string& path) {
    if (is_folder(path))
        fail("%s is a folder; name a checkpoint in it, or draw with its newest by --out_dir %s", path, shell_word(path));
    Reader in(path);
    check_format(in);
    float smoothed = std::bit_cast<float>(in.header[FIELD_SMOOTHED]);
    WeightsFile file = {path, default_config(), in.header[FIELD_STEP], smoothed};
    read_section_table(&file, in.header, in.size);

    if (!in.checksum_matches(FIELD_CHECKSUM)) fail("%s is damaged: its checksum does not match", path);
    for (const char* needed : {"weights", "config"})
        if (!file.sections.contains(needed)) fail("%s holds no %s", path, needed);
    if (file.sections["config"].bytes > 65536) fail("%s is damaged: its section config is too long", path);

    size_t parameters = 0;
    std::string why = failure_of([&] {
        read_stored_config(&file.config, read_section(&in, file, "config"));
        check_config(file.config);
        parameters = count_parameters(file.config);
    });
    if (!why.empty()) fail("%s has a setting that can't be used: %s", path, why);
    file.config.hyper.lr_steps = std::max(0, in.header[FIELD_LR_STEPS]);

    if (file.step < 0 || !std::isfinite(smoothed) || in.header[FIELD_PARAMETERS] != (int64_t)parameters)
        fail("%s is damaged: %d parameters, step %ld and loss %g don't fit its configuration", path,
             in.header[FIELD_PARAMETERS], file.step, smoothed);
    for (const char* section : ARRAY_SECTIONS)
        if (file.sections.contains(section) && file.sections[section].bytes != parameters * sizeof(float))
            fail("%s is damaged: its section %s has the wrong length", path, section);

    size_t classes = file.config.class_cond ? file.config.num_classes : 0;
    file.class_names = parse_class_names(read_section(&in, file, "class_names"), path, 0, classes);
    file.data_checksum = read_section(&in, file, "data_checksum");
    read_history(&file, read_section(&in, file, "state"));
    return file;
}

static std::string checkpoint_path(const std::string& folder, long step) {
    return text("%s/checkpoint_%08ld.bin", folder, step);
}

// Steps of the checkpoints in a folder, newest first, whole or not.
static std::vector<long> list_checkpoints(const std::string& folder) {
    std::error_code error;
    std::vector<long> steps;
    for (const std::string& name : list_folder(folder, &error)) {
        long step = -1;
        sscanf(name.c_str(), "checkpoint_%8ld", &step);
        bool is_checkpoint = step >= 0 && folder + "/" + name == checkpoint_path(folder, step);
        if (is_checkpoint) steps.push_back(step);
    }
    if (error && error != std::errc::no_such_file_or_directory && error != std::errc::not_a_directory)
        fail("can't list the folder %s: %s", folder, error.message());
    std::sort(steps.rbegin(), steps.rend());
    return steps;
}

// The newest checkpoint of a folder that is whole. A damaged one is named and passed over. One of an earlier format is
// not passed over: it may be the newest, and its failure tells the command that converts it.
static WeightsFile newest_checkpoint(const std::string& folder, const char* otherwise) {
    std::vector<long> steps = list_checkpoints(folder);
    for (long step : steps) {
        try {
            return open_weights(checkpoint_path(folder, step));
        } catch (const EarlierFormat&) {
            throw;
        } catch (const Failure& failure) {
            note("passed over: " + failure.sentence);
        }
    }
    const char* whole = steps.empty() ? "" : "whole ";
    fail("there is no %scheckpoint in %s; %s", whole, folder, otherwise);
}

// ---- pictures ---------------------------------------------------------------------------------------------
// How many of N pictures stand in a row of their grid, which is about square. Where the pictures are `groups` groups of
// equally many, such as classes, each group has a row; where that takes more than 4,000 pixels a side, as many groups
// share a row as make the grid square.
static int grid_columns(int N, int groups, int image_size) {
    int square = (int)ceil(sqrt((double)N));
    if (!groups) return square;

    int each = N / groups;
    bool fits = std::max(each, groups) * (image_size + 2) <= 4000;
    if (fits) return each;
    if (each >= square) return square;
    int groups_a_row = square / each;
    return groups_a_row * each;
}

// A picture of bytes (height, width, channels): grey, grey and alpha, RGB or RGBA.
struct Raster {
    int width, height, channels;
    std::vector<uint8_t> bytes;
    size_t place(size_t x, size_t y) const { return (y * width + x) * channels; }
};

// pictures (N, H, W, PIXEL) in [-1, 1] as a grid with white gaps.
static Raster draw_grid(std::span<const float> pictures, int columns, const Config& c, int gap = 2) {
    int H = c.image_size, C = c.in_channels;
    int N = (int)(pictures.size() / (H * H * PIXEL));
    int rows = (N + columns - 1) / columns;
    int width = columns * (H + gap) + gap;
    int height = rows * (H + gap) + gap;
    Raster grid = {width, height, C, std::vector<uint8_t>((size_t)width * height * C, 255)};

    for (int n = 0; n < N; n++) {
        int top = n / columns * (H + gap) + gap;
        int left = n % columns * (H + gap) + gap;
        const float* pixel = &pictures[(size_t)n * H * H * PIXEL];
        for (int i = 0; i < H * H; i++) {
            uint8_t* bytes = &grid.bytes[grid.place(left + i % H, top + i / H)];
            for (int k = 0; k < C; k++) bytes[k] = byte_of(pixel[k]);
            pixel += PIXEL;
        }
    }
    return grid;
}

static std::string big_endian(uint32_t value) {
    return {(char)(value >> 24), (char)(value >> 16), (char)(value >> 8), (char)value};
}

// Paeth's predictor of PNG: whichever of the bytes to the left, above, and at the corner of these two is nearest to
// left + up - corner. Where two are as near, the one named first.
static int paeth(int left, int up, int corner) {
    int to_left = abs(up - corner);
    int to_up = abs(left - corner);
    int to_corner = abs(left + up - 2 * corner);
    if (to_left <= to_up && to_left <= to_corner) return left;
    if (to_up <= to_corner) return up;
    return corner;
}

// Every line of a picture as PNG stores it: the filter's number, 4, then each byte's difference from what Paeth's
// predictor says. Beyond the edges all bytes are 0.
static std::vector<uint8_t> filter_lines(const Raster& picture) {
    size_t channels = picture.channels;
    size_t pitch = picture.width * channels;
    std::vector<uint8_t> line(channels + pitch), above;  // with a pixel of zeros before the first
    std::vector<uint8_t> filtered;
    filtered.reserve((1 + pitch) * picture.height);
    for (int y = 0; y < picture.height; y++) {
        above = line;
        std::copy_n(&picture.bytes[y * pitch], pitch, &line[channels]);
        filtered.push_back(4);
        for (size_t i = 0; i < pitch; i++) {
            int predicted = paeth(line[i], above[channels + i], above[i]);
            filtered.push_back((uint8_t)(line[channels + i] - predicted));
        }
    }
    return filtered;
}

// The lengths in bits of a Huffman code for symbols that occur so often. Where one is longer than the 15 bits
// that deflate allows, the counts are halved, which makes them more alike, and the code is made anew.
static std::vector<int> code_lengths(std::vector<uint32_t> counts) {
    std::vector<int> lengths;
    do {
        lengths.assign(counts.size(), 0);
        std::multimap<uint32_t, std::vector<int>> trees;  // the symbols of each, by their count
        for (int symbol = 0; symbol < (int)counts.size(); symbol++)
            if (counts[symbol]) trees.insert({counts[symbol], {symbol}});

        while (trees.size() > 1) {  // the two rarest are joined: their symbols lie a bit deeper
            auto rarest = trees.extract(trees.begin());
            auto next = trees.extract(trees.begin());
            std::vector<int> joined = rarest.mapped();
            joined.insert(joined.end(), next.mapped().begin(), next.mapped().end());
            for (int symbol : joined) lengths[symbol]++;
            trees.insert({rarest.key() + next.key(), joined});
        }
        for (uint32_t& count : counts) count = (count + 1) / 2;
    } while (std::ranges::max(lengths) > 15);
    return lengths;
}

// The lowest n bits of a code in the opposite order.
static uint32_t reversed(uint32_t code, int n) {
    uint32_t turned = 0;
    for (int bit = 0; bit < n; bit++) {
        turned = turned << 1 | (code & 1);
        code >>= 1;
    }
    return turned;
}

// Deflate's code for symbols of these lengths (RFC 1951, section 3.2.2): consecutive numbers, first for the shortest
// codes, and among those of one length first for the lowest symbol. Reversed, as DeflateStream writes them.
static std::vector<uint32_t> deflate_codes(const std::vector<int>& lengths) {
    std::vector<uint32_t> codes(lengths.size(), 0);
    uint32_t code = 0;
    for (int length = 1; length <= 15; length++) {
        for (size_t symbol = 0; symbol < lengths.size(); symbol++) {
            if (lengths[symbol] != length) continue;
            codes[symbol] = reversed(code, length);
            code++;
        }
        code *= 2;
    }
    return codes;
}

// What a block holds: a byte, the end of a block, or a match, whose length is told by a symbol and some bits more.
struct DeflateSymbol {
    int symbol;
    int more = 0;
    uint32_t rest = 0;  // `more` bits
};
enum { END_OF_BLOCK = 256, FIRST_MATCH = 257, DEFLATE_SYMBOLS = 286 };

// A block's bytes as symbols. Bytes that repeat the one before them are a match at distance 1. Longer distances are not
// tried, because they find nothing in what a network drew.
static std::vector<DeflateSymbol> find_matches(std::span<const uint8_t> block) {
    const size_t shortest = 4, longest = 257;
    std::vector<DeflateSymbol> found;
    size_t i = 0;
    while (i < block.size()) {
        size_t n = 0;
        while (i && n < longest && i + n < block.size() && block[i + n] == block[i - 1]) n++;
        if (n < shortest) {
            found.push_back({block[i]});
            i++;
            continue;
        }

        // a symbol stands for the three highest bits of the length and for how many more bits follow
        uint32_t length = (uint32_t)n - 3;
        int more = std::max(0, (int)std::bit_width(length) - 3);
        int symbol = FIRST_MATCH + 4 * more + (int)(length >> more);
        found.push_back({symbol, more, length & ((1u << more) - 1)});
        i += n;
    }
    found.push_back({END_OF_BLOCK});
    return found;
}

// What deflate writes (RFC 1951). The first bit is in the lowest place of a byte; a code begins with its highest bit.
struct DeflateStream {
    std::string bytes;
    uint64_t waiting = 0;  // the bits that wait until their byte is full
    int count = 0;         // how many wait

    void put(uint32_t bits, int n) {
        waiting |= (uint64_t)bits << count;
        count += n;
        while (count >= 8) {
            bytes += (char)waiting;
            waiting >>= 8;
            count -= 8;
        }
    }

    // Writes a block with a Huffman code of its own, or stores it where that is shorter. This copies `bytes`, which is
    // cheap because write_png takes them away after every block.
    void add(std::span<const uint8_t> block, bool is_last) {
        DeflateStream coded = *this;
        coded.put(is_last, 1);
        coded.put_coded(block);
        put(is_last, 1);
        put_stored(block);
        if (coded.bytes.size() < bytes.size()) *this = std::move(coded);
    }

    void put_stored(std::span<const uint8_t> block) {
        put(0, 2);
        put(0, (8 - count) % 8);  // from the next byte on
        put((uint32_t)block.size(), 16);
        put(~(uint32_t)block.size() & 0xFFFF, 16);
        bytes.append((const char*)block.data(), block.size());
    }

    void put_coded(std::span<const uint8_t> block) {
        std::vector<DeflateSymbol> found = find_matches(block);
        std::vector<uint32_t> counts(DEFLATE_SYMBOLS, 0);
        for (const DeflateSymbol& s : found) counts[s.symbol]++;
        std::vector<int> lengths = code_lengths(counts);
        std::vector<uint32_t> codes = deflate_codes(lengths);

        put(2, 2);  // a code of its own
        put(DEFLATE_SYMBOLS - 257, 5);
        put(0, 5);   // a single distance
        put(15, 4);  // all 19 lengths of the code in which the lengths are written

        // Each length is written in 4 bits. Deflate's three ways to repeat a length, which come first, are not used.
        for (int i = 0; i < 3; i++) put(0, 3);
        for (int i = 3; i < 19; i++) put(4, 3);
        for (int length : lengths) put(reversed(length, 4), 4);
        put(reversed(1, 4), 4);  // of the single distance

        for (const DeflateSymbol& s : found) {
            put(codes[s.symbol], lengths[s.symbol]);
            put(s.rest, s.more);
            if (s.symbol >= FIRST_MATCH) put(0, 1);  // the distance
        }
    }
};

// RFC 1950, section 8.2.
static uint32_t adler32(const std::vector<uint8_t>& bytes) {
    uint32_t a = 1, b = 0;
    for (uint8_t byte : bytes) {
        a = (a + byte) % 65521;
        b = (b + a) % 65521;
    }
    return b << 16 | a;
}

static void write_png_chunk(Writer* out, const std::string& type, const std::string& data) {
    std::string named = type + data;
    uint32_t crc = crc32(named.data(), named.size());
    out->write(big_endian((uint32_t)data.size()) + named + big_endian(crc));
}

// PNG's specification, and RFC 1950 for the stream within; no library is needed. Each block is a chunk of its own,
// so that a chunk's length does not limit the picture.
static void write_png(const std::string& path, const Raster& picture) {
    std::string size = big_endian((uint32_t)picture.width) + big_endian((uint32_t)picture.height);
    char colours = "\x00\x04\x02\x06"[picture.channels - 1];
    std::vector<uint8_t> lines = filter_lines(picture);
    Writer out(path);
    out.write("\x89PNG\r\n\x1A\n");
    write_png_chunk(&out, "IHDR", size + std::string{8, colours, 0, 0, 0});
    write_png_chunk(&out, "IDAT", "\x78\x01");

    DeflateStream stream;
    const size_t most = 65535;  // bytes of a block that can be stored
    for (size_t start = 0; start < lines.size(); start += most) {
        std::span<const uint8_t> block(&lines[start], std::min(most, lines.size() - start));
        bool is_last = start + block.size() == lines.size();
        stream.add(block, is_last);
        write_png_chunk(&out, "IDAT", std::exchange(stream.bytes, ""));
    }
    stream.put(0, 7);  // fills the last byte
    write_png_chunk(&out, "IDAT", stream.bytes + big_endian(adler32(lines)));
    write_png_chunk(&out, "IEND", "");
    out.commit();
}

// pictures (N, H, W, PIXEL) as a file of NumPy's, .npy (its format's version 1.0): floats (N, C, H, W).
static void write_array(const std::string& path, const std::vector<float>& pictures, const Config& c) {
    size_t pixels = c.image_size * c.image_size;
    size_t count = pictures.size() / pixels / PIXEL;
    std::string header = text("{'descr': '<f4', 'fortran_order': False, 'shape': (%zu, %d, %d, %d), }", count,
                              c.in_channels, c.image_size, c.image_size);
    header.resize(117, ' ');
    Writer out(path);
    out.write("\x93NUMPY\x01" + std::string{0, 118, 0} + header + "\n");

    std::vector<float> channel(pixels);
    for (size_t n = 0; n < count; n++)
        for (int k = 0; k < c.in_channels; k++) {
            for (size_t i = 0; i < pixels; i++) channel[i] = pictures[(n * pixels + i) * PIXEL + k];
            out.write(channel.data(), pixels * sizeof(float));
        }
    out.commit();
}

// ---- pictures in a terminal -------------------------------------------------------------------------------
// How a terminal can show a picture: by kitty's graphics protocol, by iTerm2's inline images, or as coloured text.
enum Display { DISPLAY_NOTHING, DISPLAY_KITTY, DISPLAY_ITERM, DISPLAY_HALF_BLOCKS };

static std::string environment(const char* name) {
    const char* value = getenv(name);
    return value ? value : "";
}

// What standard output can show, by the environment alone: a terminal that is asked may never answer.
static Display terminal_display() {
    std::string term = environment("TERM");
    std::string program = environment("TERM_PROGRAM");
    if (!isatty(1) || term.empty() || term == "dumb") return DISPLAY_NOTHING;

    // tmux and its like draw the screen themselves, and pass no pictures on
    bool is_inside = term.starts_with("tmux") || term.starts_with("screen");
    for (const char* name : {"TMUX", "STY", "ZELLIJ"}) is_inside |= !environment(name).empty();

    // a program that kitty starts, such as another terminal, inherits its KITTY_WINDOW_ID
    bool is_kitty = term == "xterm-kitty" || (program.empty() && !environment("KITTY_WINDOW_ID").empty());
    bool is_ghostty = term == "xterm-ghostty" || program == "ghostty";
    bool is_iterm = program == "iTerm.app" || environment("LC_TERMINAL") == "iTerm2";  // the second also over ssh
    bool is_like_iterm = program == "WezTerm" || program == "mintty";
    if (!is_inside && (is_kitty || is_ghostty)) return DISPLAY_KITTY;
    if (!is_inside && (is_iterm || is_like_iterm)) return DISPLAY_ITERM;

    std::string locale;
    for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"})  // the first that is set counts
        if (locale.empty()) locale = environment(name);
    bool has_half_blocks = strcasestr(locale.c_str(), "utf-8") || strcasestr(locale.c_str(), "utf8");
    if (has_half_blocks && environment("NO_COLOR").empty()) return DISPLAY_HALF_BLOCKS;
    return DISPLAY_NOTHING;
}

static int terminal_columns() {
    struct winsize size = {};
    bool is_known = ioctl(1, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
    return is_known ? size.ws_col : 80;
}

// RFC 4648, section 4.
static std::string base64(const std::string& bytes) {
    const char* digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string encoded;
    for (size_t bit = 0; bit < 8 * bytes.size(); bit += 6) {
        int pair = (uint8_t)bytes[bit / 8] << 8 | (uint8_t)bytes[bit / 8 + 1];  // behind the last byte is a 0
        encoded += digits[pair >> (10 - bit % 8) & 63];
    }
    encoded.resize((encoded.size() + 3) / 4 * 4, '=');
    return encoded;
}

// A PNG so many cells wide, in chunks of 4,096 characters; q=2: the terminal is not to answer.
// https://sw.kovidgoyal.net/kitty/graphics-protocol/
static std::string kitty_picture(const std::string& png, int cells) {
    const size_t chunk = 4096;
    std::string encoded = base64(png);
    std::string keys = text("a=T,f=100,q=2,c=%d,", cells);
    std::string shown;
    for (size_t at = 0; at < encoded.size(); at += chunk) {
        bool has_more = at + chunk < encoded.size();
        shown += "\x1B_G" + keys + text("m=%d;", has_more) + encoded.substr(at, chunk) + "\x1B\\";
        keys = "";  // only the first chunk has them
    }
    return shown + "\n";
}

// https://iterm2.com/documentation-images.html
static std::string iterm_picture(const std::string& png, int cells) {
    return text("\x1B]1337;File=inline=1;size=%zu;width=%d:", png.size(), cells) + base64(png) + "\a\n";
}

// The mean colour, "R;G;B", of the pixels that pixel (x, y) covers where the picture is scaled down to w x h. What is
// transparent lies over white.
static std::string mean_colour(const Raster& picture, int x, int y, int w, int h) {
    int left = x * picture.width / w;
    int right = (x + 1) * picture.width / w;
    int top = y * picture.height / h;
    int bottom = (y + 1) * picture.height / h;

    bool has_alpha = picture.channels % 2 == 0;
    bool is_grey = picture.channels < 3;
    int64_t sums[3] = {0};  // of 255 times the colour, since opacity goes up to 255
    for (int v = top; v < bottom; v++)
        for (int u = left; u < right; u++) {
            const uint8_t* pixel = &picture.bytes[picture.place(u, v)];
            int alpha = has_alpha ? pixel[picture.channels - 1] : 255;
            for (int k = 0; k < 3; k++) sums[k] += pixel[is_grey ? 0 : k] * alpha + 255 * (255 - alpha);
        }

    int64_t count = 255 * (int64_t)(right - left) * (bottom - top);
    auto rounded_mean = [&](int k) { return (int)((sums[k] + count / 2) / count); };
    return text("%d;%d;%d", rounded_mean(0), rounded_mean(1), rounded_mean(2));
}

// A picture as coloured text, scaled down to as many columns. Each cell shows two pixels, one above the other: its
// sign is the upper half block, which shows the upper pixel's colour over a background of the lower pixel's.
static std::string half_blocks(const Raster& picture, int columns) {
    int w = std::min(picture.width, columns);
    int rows = std::max(1, (int)((int64_t)picture.height * w / picture.width / 2));
    std::string shown;
    for (int row = 0; row < rows; row++) {
        for (int x = 0; x < w; x++) {
            std::string upper = mean_colour(picture, x, 2 * row, w, 2 * rows);
            std::string lower = mean_colour(picture, x, 2 * row + 1, w, 2 * rows);
            shown += "\x1B[38;2;" + upper + ";48;2;" + lower + "m\u2580";
        }
        shown += "\x1B[0m\n";
    }
    return shown;
}

// Shows a grid, which the PNG file `path` holds, where standard output is a terminal that can.
static void show_grid(const std::string& path, const Raster& grid) {
    Display display = terminal_display();
    if (std::max(grid.width, grid.height) > 4000) return;  // more than some terminals take

    int columns = terminal_columns();
    int cells = std::min((grid.width + 7) / 8, columns);  // a cell is some 8 pixels wide, or 16 on a fine screen
    std::string shown;
    if (display == DISPLAY_KITTY) shown = kitty_picture(read_text(path), cells);
    if (display == DISPLAY_ITERM) shown = iterm_picture(read_text(path), cells);
    if (display == DISPLAY_HALF_BLOCKS) shown = half_blocks(grid, columns);
    fputs(shown.c_str(), stdout);
}

// ---- the model of a file, and lists -----------------------------------------------------------------------
// What a file's settings are taken over for.
enum Taking { TO_SAMPLE, TO_START, TO_RESUME };

// Whether a flag's value comes from the file: where it describes the model, and on resuming also where a run keeps it.
static bool is_taken(const Flag& flag, Taking taking) {
    if (flag.group == MODEL || flag.group == DIFFUSION) return true;
    if (taking == TO_RESUME) return flag.on_resume == FIXED;
    bool of_timesteps = contains({"consistency", "consistency_steps", "path_steps"}, flag.name);
    return taking == TO_SAMPLE && of_timesteps;  // which the model has learned
}

// Takes a file's settings over. Given flags must not contradict them; only a run that starts from a file's weights may
// have other classes.
static void take_from_file(Config* config, const GivenFlags& given, const WeightsFile& file, Taking taking) {
    for (const Flag& flag : FLAGS) {
        if (!is_taken(flag, taking)) continue;
        const GivenFlag* g = was_given(given, flag.name);
        bool of_classes = contains({"class_cond", "num_classes", "cond_drop_prob"}, flag.name);
        if (taking == TO_START && g && of_classes && config->class_cond) continue;

        std::string asked = flag_text(*config, flag);
        std::string stored = flag_text(file.config, flag);
        if (g && asked != stored) {
            std::string origin;
            if (!g->origin.empty()) origin = " (" + g->origin + ")";
            fail("--%s %s%s contradicts %s, which was made with %s; leave the flag out, or start a new run",
                 flag.name, asked, origin, file.path, stored.empty() ? "none" : stored);
        }
        set_flag(config, flag, stored);
    }
}

// A run that starts from a file's weights draws timesteps as the file's run did, where the flags say nothing else. If
// --timestep_sampling is given, the file's mean and deviation are not taken either, because they belong to its own way.
static void take_timestep_sampling(Config* config, const GivenFlags& given, const Config& run) {
    if (was_given(given, "timestep_sampling")) return;
    for (const char* name : {"timestep_sampling", "timestep_mean", "timestep_std"})
        if (!was_given(given, name)) set_flag(config, flag_named(name), flag_text(run, flag_named(name)));
}

// Pictures are drawn as the run drew its grids, where the flags say nothing else. Where --sampler is given, the run's
// steps, spacing and eta are not taken either, because they were for another sampler. Returns what was taken and is not
// the default, as it would be typed.
static std::string take_sampling(Config* config, const GivenFlags& given, const Config& run) {
    std::string taken;
    for (const Flag& flag : FLAGS) {
        if (flag.group != SAMPLING || was_given(given, flag.name)) continue;
        bool of_sampler = contains({"sample_steps", "spacing", "eta"}, flag.name);
        if (of_sampler && was_given(given, "sampler")) continue;

        std::string value = flag_text(run, flag);
        set_flag(config, flag, value);
        if (value != flag.standard) taken += text(" --%s %s", flag.name, value);
    }
    return taken;
}

static Config given_config(const GivenFlags& given) {
    Config config = default_config();
    apply_flags(&config, given);
    choose_sampler(&config, given);
    config.hyper.lr_steps = config.steps;
    return config;
}

static std::vector<uint32_t> consecutive(uint32_t first, int count) {
    std::vector<uint32_t> numbers(count);
    std::iota(numbers.begin(), numbers.end(), first);
    return numbers;
}

// The numbers of a list such as 0-63 or 3,7,10-12, up to `most`.
static std::vector<uint32_t> parse_list(const char* flag, const std::string& list, uint32_t most) {
    std::vector<uint32_t> numbers;
    for (const std::string& range : split(list, ',')) {
        unsigned long first = 0, last = 0;
        int end = 0;  // of what was understood
        int count = sscanf(range.c_str(), "%10lu%n-%10lu%n", &first, &end, &last, &end);
        if (count == 1) last = first;
        bool has_other_characters = range.find_first_not_of("0123456789-") != range.npos;
        bool is_range = !has_other_characters && count >= 1 && range[end] == 0;
        if (!is_range || first > last || last > most)
            fail_usage("--%s %s is no list of numbers up to %u such as 3,7,10-12", flag, list, most);
        if (numbers.size() + (last - first) >= 1000000)
            fail_usage("--%s %s are more than a million; draw them in parts", flag, list);
        for (unsigned long number = first; number <= last; number++) numbers.push_back((uint32_t)number);
    }
    return numbers;
}

// The class whose name is a number, or that number with zeros before it; -1 where there is none. Where there are
// several, the number is refused.
static int class_called(uint32_t number, const Strings& names, const std::string& list) {
    std::string digits = text("%u", number);
    std::vector<int> exact, padded;
    for (int i = 0; i < (int)names.size(); i++) {
        const std::string& name = names[i];
        if (!name.ends_with(digits)) continue;
        size_t zeros = name.size() - digits.size();
        if (name.find_first_not_of('0') < zeros) continue;
        if (zeros) padded.push_back(i);
        else exact.push_back(i);
    }

    const std::vector<int>& found = exact.empty() ? padded : exact;
    if (found.empty()) return -1;
    if (found.size() > 1)
        fail_usage("--class %s: %u could be %s or %s", list, number, names[found[0]], names[found[1]]);
    return found[0];
}

// The classes that a word such as 0-4 names by numbers. One that the model does not have is refused.
static std::vector<uint32_t> numbered_classes(const std::string& word, const Strings& names, const std::string& list) {
    std::vector<uint32_t> numbers, classes;
    failure_of([&] { numbers = parse_list("class", word, UINT32_MAX); });
    for (uint32_t number : numbers) {
        int found = class_called(number, names, list);
        if (found < 0) break;
        classes.push_back((uint32_t)found);
    }

    bool are_all_known = !numbers.empty() && classes.size() == numbers.size();
    if (are_all_known) return classes;

    bool has_loose_accent = word.find('\xCC') != word.npos;  // the first byte of a combining accent in UTF-8
    const char* remedy = "";
    if (has_loose_accent)
        remedy = "; an accent was typed as a character of its own: copy the name as the model has it";
    fail_usage("--class %s: the model has no class called '%s'; its classes are %s%s", list, word, listed(names), remedy);
}

// The classes of a list such as cat,dog. At each place the longest name counts, so that a comma may be part of one.
// Where names are numbers, 0-4 are the classes called 0 to 4, or 00 to 04.
static std::vector<uint32_t> parse_classes(const std::string& list, const Strings& names) {
    std::vector<uint32_t> classes;
    std::string rest = list + ",";
    while (!rest.empty()) {
        rest.erase(0, rest.find_first_not_of(' '));
        int found = -1;
        size_t length = rest.find(',');
        for (int i = 0; i < (int)names.size(); i++) {
            if (names[i].size() < length || !rest.starts_with(names[i] + ",")) continue;
            found = i;
            length = names[i].size();
        }
        std::string word = trimmed(rest.substr(0, length));
        rest.erase(0, length + 1);

        if (found < 0) found = index_of(names, word);  // blanks may stand before a comma
        if (found < 0) {
            for (uint32_t number : numbered_classes(word, names, list)) classes.push_back(number);
            continue;
        }
        if (std::ranges::count(names, names[found]) > 1)
            fail_usage("--class %s: several classes are called '%s'; --class_names FILE can tell them apart", list, word);
        classes.push_back((uint32_t)found);
    }
    return classes;
}

// What the user calls the classes of a model: the lines of --class_names, or the names that it has.
static Strings shown_names(const Config& c, const Strings& own, size_t classes) {
    if (!*c.class_names || !c.class_cond) return own;

    Strings names = split(read_typed_text(c.class_names), '\n');
    if (names.back().empty()) names.pop_back();
    for (std::string& name : names) name = trimmed(name);

    if (!own.empty()) classes = own.size();
    if (names.size() != classes)
        fail("--class_names %s has %zu lines and the model has %zu classes; write one line for each", c.class_names,
             names.size(), classes);
    return names;
}

// The classes that pictures are drawn of: by default all that have names, or all where none has a name. There are none
// where the network is told no classes. Classes without names are called by their numbers.
static std::vector<uint32_t> wanted_classes(const Config& c, Strings names) {
    const char* flag = nullptr;
    if (*c.class_names) flag = "class_names";
    if (*c.classes) flag = "class";
    if (flag && !c.class_cond) fail("--%s needs a model that was trained with --class_cond 1", flag);
    if (!c.class_cond) return {};

    if (names.empty())
        for (int i = 0; i < c.num_classes; i++) names.push_back(text("%d", i));
    if (!*c.classes) return consecutive(0, (int)names.size());
    return parse_classes(c.classes, names);
}

// What the rows of a grid show, such as " (rows: cat, dog)", where each class has `each` pictures, and a row of its own
// or a share of one.
static std::string rows_text(const Strings& names, const std::vector<uint32_t>& classes, int each, int columns) {
    if (names.empty() || columns % each) return "";
    std::string kind = "rows";
    if (columns > each) kind = text("%d in a row", columns / each);

    std::string joined;
    for (uint32_t number : classes) {
        if (!joined.empty()) joined += ", ";
        joined += names[number];
    }
    return " (" + kind + ": " + joined + ")";
}

// ---- logs -------------------------------------------------------------------------------------------------
// metrics.jsonl of a run's folder, a record a line. Records that can't be written wait in memory for the next
// attempt, as on a disk that is full for a while; the file holds whole lines only.
struct Metrics {
    std::string path, waiting;
    int file = -1;
    bool warned = false;

    // Opens the log, in which the text `there` stands. Of that it keeps what steps up to resumed_step logged. It enters
    // their validation losses into `validated`.
    void open(const std::string& name, const std::string& there, long resumed_step,
              std::map<long, double>* validated) {
        path = name;
        std::string kept;
        Strings lines = split(there, '\n');
        lines.pop_back();  // what follows the last line feed was cut short
        for (const std::string& line : lines) {
            long step;
            int value_at = 0;   // 0 where the line tells no validation loss
            double loss = NAN;  // which a line tells as null
            int read = sscanf(line.c_str(), "{\"step\": %ld, \"val_loss\": %n%lf", &step, &value_at, &loss);
            if (read < 1 || step > resumed_step) continue;

            kept += line + "\n";
            if (value_at) (*validated)[step] = loss;
        }
        if (kept != there) write_text(path, kept);
        file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
        if (file < 0) fail("can't write %s: %s", path, strerror(errno));
    }

    void add(const std::string& lines) {
        if (world.rank) return;
        waiting += lines;
        size_t written = 0;
        while (written < waiting.size()) {
            ssize_t n = write(file, &waiting[written], waiting.size() - written);
            if (n <= 0) break;
            written += (size_t)n;
        }

        if (written < waiting.size()) {
            std::string why = strerror(errno);
            if (!warned) note("could not write " + path + ": " + why + "; what is missing there follows later");
            warned = true;

            // the part that was written is taken back; where that fails too, the next attempt continues it
            off_t before = lseek(file, 0, SEEK_END) - (off_t)written;
            if (!ftruncate(file, before)) written = 0;
        }
        waiting.erase(0, written);
    }

    // Makes a last attempt at what the file lacks.
    ~Metrics() {
        if (file < 0) return;
        add("");
        long lost = std::ranges::count(waiting, '\n');
        if (lost) note(path + " lacks " + counted(lost, "line"));
        close(file);
    }
};
#endif  // NETWORK_ONLY
