// A library for LD_PRELOAD that makes calls fail, for tests/test_signals.py. It counts the calls that concern
// the files under FAULT_FOLDER, notes them in FAULT_LOG, a line each (number, function, file), and lets those
// from number FAULT_AT to FAULT_UNTIL go wrong as FAULT_KIND says:
//
//   ENOSPC, EIO  nothing is done, and this error reported
//   short        the first of them, if it writes, does half; then all report a full disk
//   full         likewise, but what needs no room is done
//   die          the process is killed
//   stop         it waits for SIGCONT, and the call is made
//   otherwise    a command for the shell; then the call is made as ever
//
// FAULT_ROOM, where it is set, is how many bytes every disk says that it has free. FAULT_ALARM, where it is set, is what
// becomes of alarm(): with "never" no alarm rings; otherwise each rings at once, and then this file is made.
// FAULT_LATE, where it is set, is for how many milliseconds fprintf waits first.
//
//   cc -shared -fPIC faults.c -o faults.so -ldl
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#define REAL(function) ((__typeof__(&function))dlsym(RTLD_NEXT, #function))

static int number_of(const char* name) {
    const char* value = getenv(name);
    return value ? atoi(value) : 0;
}

enum { FINE, FAILS, SHORT };

// Counts a call and says what is to become of it; errno is set where it is to fail.
static int fault(const char* function, const char* path) {
    static int count = 0;
    const char *folder = getenv("FAULT_FOLDER"), *log = getenv("FAULT_LOG"), *kind = getenv("FAULT_KIND");
    int before = errno, at = number_of("FAULT_AT"), until = number_of("FAULT_UNTIL");
    if (!folder || strncmp(path, folder, strlen(folder))) return FINE;
    count++;
    if (log) {
        char line[5000];
        int length = snprintf(line, sizeof line, "%d %s %s\n", count, function, path);
        int fd = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND, 0666);
        if (syscall(SYS_write, fd, line, length) != length) abort();
        syscall(SYS_close, fd);
    }
    errno = before;
    if (!at || count < at || count > (until ? until : at)) return FINE;
    if (!strcmp(kind, "die")) kill(getpid(), SIGKILL);
    if (!strcmp(kind, "stop")) {
        kill(getpid(), SIGSTOP);
        errno = before;
        return FINE;
    }
    errno = !strcmp(kind, "EIO") ? EIO : ENOSPC;
    int full = !strcmp(kind, "full");
    if (full && strstr("ftruncate unlink flock opendir readdir fopen fread", function)) return FINE;
    if (full || !strcmp(kind, "short"))
        return strstr(function, "write") && count == at ? SHORT : FAILS;
    if (!strcmp(kind, "EIO") || !strcmp(kind, "ENOSPC")) return FAILS;
    unsetenv("LD_PRELOAD");
    if (system(kind)) abort();
    errno = before;
    return FINE;
}

static int fault_at(const char* function, int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int before = errno;
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = before;
    path[length > 0 ? length : 0] = 0;
    return fault(function, path);
}

#define OPEN(name)                                                      \
    int name(const char* path, int flags, ...) {                         \
        va_list more;                                                    \
        va_start(more, flags);                                           \
        mode_t mode = flags & O_CREAT ? va_arg(more, int) : 0;           \
        va_end(more);                                                    \
        return fault("open", path) ? -1 : REAL(name)(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

// A new file needs room, one that is read does not.
#define FOPEN(name)                                                                         \
    FILE* name(const char* path, const char* mode) {                                        \
        return fault(*mode == 'r' ? "fopen" : "create", path) ? 0 : REAL(name)(path, mode); \
    }
FOPEN(fopen)
FOPEN(fopen64)
DIR* opendir(const char* path) { return fault("opendir", path) ? 0 : REAL(opendir)(path); }
struct dirent* readdir(DIR* dir) { return fault_at("readdir", dirfd(dir)) ? 0 : REAL(readdir)(dir); }

size_t fread(void* to, size_t size, size_t count, FILE* file) {
    return fault_at("fread", fileno(file)) ? 0 : REAL(fread)(to, size, count, file);
}
size_t fwrite(const void* from, size_t size, size_t count, FILE* file) {
    int wrong = fault_at("fwrite", fileno(file));
    return wrong == FAILS ? 0 : REAL(fwrite)(from, size, wrong ? count / 2 : count, file);
}
ssize_t write(int fd, const void* from, size_t bytes) {
    int wrong = fault_at("write", fd);
    return wrong == FAILS ? -1 : REAL(write)(fd, from, wrong ? bytes / 2 : bytes);
}
int fseeko(FILE* file, off_t offset, int whence) {
    return fault_at("fseeko", fileno(file)) ? -1 : REAL(fseeko)(file, offset, whence);
}
int fflush(FILE* file) { return file && fault_at("fflush", fileno(file)) ? EOF : REAL(fflush)(file); }
int fsync(int fd) { return fault_at("fsync", fd) ? -1 : REAL(fsync)(fd); }
int ftruncate(int fd, off_t length) { return fault_at("ftruncate", fd) ? -1 : REAL(ftruncate)(fd, length); }
int flock(int fd, int operation) {
    int (*real)(int, int) = dlsym(RTLD_NEXT, "flock");
    return fault_at("flock", fd) ? -1 : real(fd, operation);
}
int rename(const char* from, const char* to) { return fault("rename", from) ? -1 : REAL(rename)(from, to); }
int unlink(const char* path) { return fault("unlink", path) ? -1 : REAL(unlink)(path); }
int mkdir(const char* path, mode_t mode) {
    int (*real)(const char*, mode_t) = dlsym(RTLD_NEXT, "mkdir");
    return fault("mkdir", path) ? -1 : real(path, mode);
}
int statvfs(const char* path, struct statvfs* disk) {
    int (*real)(const char*, struct statvfs*) = dlsym(RTLD_NEXT, "statvfs"), result = real(path, disk);
    if (getenv("FAULT_ROOM")) disk->f_frsize = 1, disk->f_bavail = number_of("FAULT_ROOM");
    return result;
}
int fprintf(FILE* file, const char* format, ...) {
    va_list more;
    usleep(1000 * number_of("FAULT_LATE"));
    va_start(more, format);
    int result = vfprintf(file, format, more);
    va_end(more);
    return result;
}
unsigned alarm(unsigned seconds) {
    const char* made = getenv("FAULT_ALARM");
    if (!made) return REAL(alarm)(seconds);
    if (!strcmp(made, "never")) return 0;
    raise(SIGALRM);
    syscall(SYS_close, (int)syscall(SYS_openat, AT_FDCWD, made, O_WRONLY | O_CREAT, 0666));
    return 0;
}
// What is closed is closed, whatever is reported.
int fclose(FILE* file) {
    int wrong = fault_at("fclose", fileno(file)), error = errno, result = REAL(fclose)(file);
    if (wrong) errno = error;
    return wrong ? EOF : result;
}
int close(int fd) {
    int wrong = fault_at("close", fd), error = errno, result = REAL(close)(fd);
    if (wrong) errno = error;
    return wrong ? -1 : result;
}
