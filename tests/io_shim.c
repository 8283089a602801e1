/* A drive that misbehaves: between a program and the system's reads, by LD_PRELOAD.
 *
 * In:  SHIM_CONTROL, path of a small text file that is looked at before every read, so that a test changes the drive while a program runs:
 *          files=PART           only files whose path contains PART are touched
 *          bytes_per_s=N        one lane of N bytes per second
 *          eio_every=N          every N-th read fails with EIO; the next one at the same place does not
 *          eio_from=A eio_to=B  reads at an offset (pread) that touch bytes A <= b < B fail with EIO, always; headers are read without one
 *          short=N              at most N bytes a read
 *          hang_every=N hang_ms=M   every N-th read takes M ms, if it is one at an offset
 *      SHIM_LOG, path of a file that gets a letter per read: . done, e failed, s short, h hung
 * Out: the system's own results otherwise; no byte is ever changed
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define REMEMBERED 64

struct control {
    char files[256];
    long bytes_per_s, eio_every, eio_from, eio_to, shorten, hang_every, hang_ms;
};

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER, lane = PTHREAD_MUTEX_INITIALIZER;
static long reads, failed_at[REMEMBERED];

static ssize_t system_read(int fd, const struct iovec *parts, int count, off_t at, int flags) {
    if (at < 0)
        return syscall(SYS_readv, fd, parts, count);
    return syscall(SYS_preadv2, fd, parts, count, (long)at, 0L, flags);
}

static long number(const char *text, const char *name) {
    const char *found = strstr(text, name);
    return found ? atol(found + strlen(name)) : 0;
}

static int load(struct control *c) {
    char text[1024];
    const char *path = getenv("SHIM_CONTROL");
    int fd = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0) : -1;
    if (fd < 0)
        return 0;
    ssize_t size = syscall(SYS_read, fd, text, sizeof text - 1);
    syscall(SYS_close, fd);
    text[size > 0 ? size : 0] = 0;
    const char *files = strstr(text, "files=");
    if (!files || sscanf(files, "files=%255s", c->files) != 1)
        return 0;
    c->bytes_per_s = number(text, "bytes_per_s=");
    c->eio_every = number(text, "eio_every=");
    c->eio_from = number(text, "eio_from=");
    c->eio_to = number(text, "eio_to=");
    c->shorten = number(text, "short=");
    c->hang_every = number(text, "hang_every=");
    c->hang_ms = number(text, "hang_ms=");
    return 1;
}

static int chosen(int fd, const struct control *c) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size <= 0)
        return 0;
    path[size] = 0;
    return strstr(path, c->files) != NULL;
}

static void note(char letter) {
    const char *path = getenv("SHIM_LOG");
    int fd = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    if (fd < 0)
        return;
    syscall(SYS_write, fd, &letter, 1);
    syscall(SYS_close, fd);
}

static void wait_ns(long long ns) {
    struct timespec left = {ns / 1000000000, ns % 1000000000};
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {
    }
}

/* Whether this read, the number-th, is to fail; the place is remembered, so that the next read there succeeds. */
static int fails_once(long number, long every, off_t at) {
    for (int i = 0; i < REMEMBERED; i++)
        if (failed_at[i] == at + 1) {
            failed_at[i] = 0;
            return 0;
        }
    if (every <= 0 || number % every != 0)
        return 0;
    for (int i = 0; i < REMEMBERED; i++)
        if (failed_at[i] == 0) {
            failed_at[i] = at + 1;
            return 1;
        }
    return 0;
}

static ssize_t faulty_read(int fd, const struct iovec *parts, int count, off_t at, int flags) {
    struct control c = {0};
    if (!load(&c) || !chosen(fd, &c))
        return system_read(fd, parts, count, at, flags);
    size_t size = 0;
    for (int i = 0; i < count; i++)
        size += parts[i].iov_len;
    pthread_mutex_lock(&guard);
    long number = ++reads;
    int once = fails_once(number, c.eio_every, at);
    pthread_mutex_unlock(&guard);
    if (at >= 0 && c.hang_every > 0 && number % c.hang_every == 0) {
        note('h');
        wait_ns(c.hang_ms * 1000000LL);
    }
    if (once || (at >= 0 && at < c.eio_to && at + (off_t)size > c.eio_from)) {
        note('e');
        errno = EIO;
        return -1;
    }
    ssize_t done = system_read(fd, parts, count, at, flags); /* all of it: a direct read of an odd size would be refused */
    int cut = c.shorten > 0 && done > c.shorten;
    if (cut)
        done = c.shorten;
    note(cut ? 's' : '.');
    if (c.bytes_per_s > 0 && done > 0) {
        pthread_mutex_lock(&lane);
        wait_ns(done * 1000000000LL / c.bytes_per_s);
        pthread_mutex_unlock(&lane);
    }
    return done;
}

static ssize_t one(int fd, void *target, size_t size, off_t at) {
    struct iovec part = {target, size};
    return faulty_read(fd, &part, 1, at, 0);
}

ssize_t read(int fd, void *target, size_t size) { return one(fd, target, size, -1); }
ssize_t pread(int fd, void *target, size_t size, off_t at) { return one(fd, target, size, at); }
ssize_t pread64(int fd, void *target, size_t size, off64_t at) { return one(fd, target, size, at); }
ssize_t readv(int fd, const struct iovec *parts, int count) { return faulty_read(fd, parts, count, -1, 0); }
ssize_t preadv(int fd, const struct iovec *parts, int count, off_t at) { return faulty_read(fd, parts, count, at, 0); }
ssize_t preadv64(int fd, const struct iovec *parts, int count, off64_t at) { return faulty_read(fd, parts, count, at, 0); }
ssize_t preadv2(int fd, const struct iovec *parts, int count, off_t at, int flags) { return faulty_read(fd, parts, count, at, flags); }
ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off64_t at, int flags) { return faulty_read(fd, parts, count, at, flags); }
