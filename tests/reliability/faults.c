/* Preloaded by the checks of the store: the n-th input or output on files under one directory fails with a chosen errno. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

enum { WRITES = 1, SYNCS = 2, TRUNCATES = 4, NAMES = 8, READS = 16 };

static char directory_[4096];
static int kinds_, error_, sticky_;
static long countdown, hits;

/* Make call number `after` of these kinds fail. sticky: every later call fails too, as on a disk that stays full. */
void fault_arm(const char *directory, int kinds, int error, long after, int sticky) {
    snprintf(directory_, sizeof directory_, "%s", directory);
    error_ = error, countdown = after, sticky_ = sticky, hits = 0, kinds_ = kinds;
}

/* Return the number of calls that failed. */
long fault_disarm(void) {
    kinds_ = 0;
    return hits;
}

static int fails(int kind, const char *path) {
    if (!(kinds_ & kind) || strncmp(path, directory_, strlen(directory_)) != 0) return 0;
    if (countdown-- > 0 || (hits && !sticky_)) return 0;
    hits++;
    errno = error_;
    return 1;
}

static int fails_fd(int kind, int fd) {
    char link[64], path[4096];
    if (!(kinds_ & kind)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return fails(kind, path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *data, size_t size) {
    return fails_fd(WRITES, fd) ? -1 : REAL(write)(fd, data, size);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    return fails_fd(WRITES, fd) ? -1 : REAL(pwrite)(fd, data, size, at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    return fails_fd(WRITES, fd) ? -1 : REAL(pwrite64)(fd, data, size, at);
}
ssize_t read(int fd, void *data, size_t size) {
    return fails_fd(READS, fd) ? -1 : REAL(read)(fd, data, size);
}
ssize_t pread(int fd, void *data, size_t size, off_t at) {
    return fails_fd(READS, fd) ? -1 : REAL(pread)(fd, data, size, at);
}
ssize_t pread64(int fd, void *data, size_t size, off64_t at) {
    return fails_fd(READS, fd) ? -1 : REAL(pread64)(fd, data, size, at);
}
int fsync(int fd) { return fails_fd(SYNCS, fd) ? -1 : REAL(fsync)(fd); }
int fdatasync(int fd) { return fails_fd(SYNCS, fd) ? -1 : REAL(fdatasync)(fd); }
int ftruncate(int fd, off_t size) { return fails_fd(TRUNCATES, fd) ? -1 : REAL(ftruncate)(fd, size); }
int ftruncate64(int fd, off64_t size) { return fails_fd(TRUNCATES, fd) ? -1 : REAL(ftruncate64)(fd, size); }
int rename(const char *from, const char *to) { return fails(NAMES, to) ? -1 : REAL(rename)(from, to); }
int renameat(int a, const char *from, int b, const char *to) {
    return fails(NAMES, to) ? -1 : REAL(renameat)(a, from, b, to);
}
int unlink(const char *path) { return fails(NAMES, path) ? -1 : REAL(unlink)(path); }
int mkdir(const char *path, mode_t mode) { return fails(NAMES, path) ? -1 : REAL(mkdir)(path, mode); }

static int opens(int (*real)(const char *, int, ...), const char *path, int flags, mode_t mode) {
    return (flags & O_CREAT) && fails(NAMES, path) ? -1 : real(path, flags, mode);
}
int open(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return opens(REAL(open), path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return opens(REAL(open64), path, flags, mode);
}
