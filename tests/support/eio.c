/* A disk that dies, for tests/tiers/test_eio.py to preload: calls on files below one folder fail with EIO.

   Python reads records by preadv2, writes them by write, makes them durable by fsync, and looks at what a
   folder lists by lstat, unless the folder tells what is a file: with "lstat" broken, none does. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char broken_call[16], broken_path[PATH_MAX];
static atomic_int broken, left, failures;

/* From now on `call` fails on `path` and what is below it, but for the first `after` times. */
void eio_start(const char *call, const char *path, int after) {
    snprintf(broken_call, sizeof broken_call, "%s", call);
    snprintf(broken_path, sizeof broken_path, "%s", path);
    left = after;
    failures = 0;
    broken = 1;
}

/* The disk works again; returns how many calls failed. */
int eio_stop(void) {
    broken = 0;
    return failures;
}

static int breaks(const char *call) {
    return broken && !strcmp(call, broken_call);
}

static int fails_at(const char *path) {
    size_t length = strlen(broken_path);
    if (strncmp(path, broken_path, length) || (path[length] && path[length] != '/'))
        return 0;
    if (atomic_fetch_sub(&left, 1) > 0)
        return 0;
    failures++;
    errno = EIO;
    return 1;
}

static int fails(const char *call, int file) {
    char link[32], path[PATH_MAX];
    if (!breaks(call))
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0)
        return 0;
    path[size] = 0;
    return fails_at(path);
}

ssize_t write(int file, const void *data, size_t size) {
    return fails("write", file) ? -1 : syscall(SYS_write, file, data, size);
}

int fsync(int file) {
    return fails("fsync", file) ? -1 : syscall(SYS_fsync, file);
}

ssize_t preadv64v2(int file, const struct iovec *parts, int count, off64_t offset, int flags) {
    return fails("preadv2", file) ? -1 : syscall(SYS_preadv2, file, parts, count, offset, 0L, flags);
}

ssize_t preadv2(int file, const struct iovec *parts, int count, off_t offset, int flags) {
    return preadv64v2(file, parts, count, offset, flags);
}

int lstat64(const char *path, struct stat64 *status) {
    if (breaks("lstat") && fails_at(path))
        return -1;
    return syscall(SYS_newfstatat, AT_FDCWD, path, status, AT_SYMLINK_NOFOLLOW);
}

int lstat(const char *path, struct stat *status) {
    return lstat64(path, (struct stat64 *)status);
}

struct dirent64 *readdir64(DIR *folder) {
    struct dirent64 *(*next)(DIR *) = dlsym(RTLD_NEXT, "readdir64");
    struct dirent64 *entry = next(folder);
    if (entry && breaks("lstat"))
        entry->d_type = DT_UNKNOWN;
    return entry;
}

struct dirent *readdir(DIR *folder) {
    return (struct dirent *)readdir64(folder);
}
