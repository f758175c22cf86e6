/* File calls of one process that fail, wait or do nothing when told to; see fault_shim.py.

   FAULT_SHIM_UNDER is the folder whose files are touched, FAULT_SHIM_CONTROL a file that holds one
   cell for each (call, file) pair. Whoever maps that file switches faults while the process runs. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { READ, WRITE, SYNC, ALLOCATE, CALLS };
enum { SEGMENT, INDEX, META, OTHER, TARGETS };
enum { HANG = -1, PRETEND = -2 };
#define META_BYTES 8192
#define POLL_MICROSECONDS 2000

struct cell {
    int32_t action; /* 0: as it is; above 0: errno to fail with; HANG; PRETEND */
    int32_t left;   /* calls that are still to be hit; negative: all */
    int32_t hits;   /* calls that were hit */
    int32_t inside; /* calls that hang at present */
};

static struct cell *cells;
static const char *under;

__attribute__((constructor)) static void start(void)
{
    const char *control = getenv("FAULT_SHIM_CONTROL");
    under = getenv("FAULT_SHIM_UNDER");
    if (!control || !under)
        return;
    int fd = open(control, O_RDWR | O_CLOEXEC);
    size_t length = sizeof(struct cell) * CALLS * TARGETS;
    void *found = fd < 0 ? MAP_FAILED : mmap(0, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (found == MAP_FAILED) {
        fprintf(stderr, "fault shim: %s cannot be mapped\n", control);
        abort();
    }
    close(fd);
    cells = found;
}

/* Which kind of file a descriptor is of; -1 for files that are nobody's business. */
static int target_of(int fd, int is_write, off_t offset)
{
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return -1;
    path[length] = 0;
    if (strncmp(path, under, strlen(under)))
        return -1;
    if (strstr(path, ".seg"))
        return SEGMENT;
    if (strstr(path, "data.mdb"))
        return is_write && offset >= 0 && offset < META_BYTES ? META : INDEX;
    return OTHER;
}

/* 0: make the call; PRETEND: say it is done; else the errno to fail with. */
static int fault(int call, int fd, off_t offset)
{
    if (!cells)
        return 0;
    int kept = errno, target = target_of(fd, call == WRITE, offset);
    errno = kept;
    if (target < 0)
        return 0;
    struct cell *cell = &cells[call * TARGETS + target];
    int action = __atomic_load_n(&cell->action, __ATOMIC_SEQ_CST);
    if (!action)
        return 0;
    if (__atomic_load_n(&cell->left, __ATOMIC_SEQ_CST) >= 0 &&
        __atomic_fetch_sub(&cell->left, 1, __ATOMIC_SEQ_CST) <= 0) {
        __atomic_store_n(&cell->left, 0, __ATOMIC_SEQ_CST);
        return 0;
    }
    __atomic_fetch_add(&cell->hits, 1, __ATOMIC_SEQ_CST);
    if (action == HANG) {
        __atomic_fetch_add(&cell->inside, 1, __ATOMIC_SEQ_CST);
        while (__atomic_load_n(&cell->action, __ATOMIC_SEQ_CST) == HANG)
            usleep(POLL_MICROSECONDS);
        __atomic_fetch_sub(&cell->inside, 1, __ATOMIC_SEQ_CST);
        errno = kept;
        return 0;
    }
    return action;
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) \
        real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define HIT(call, fd, offset, pretended) \
    do { \
        int hit = fault(call, fd, offset); \
        if (hit == PRETEND) \
            return pretended; \
        if (hit) { \
            errno = hit; \
            return -1; \
        } \
    } while (0)

static ssize_t total(const struct iovec *parts, int count)
{
    ssize_t sum = 0;
    for (int i = 0; i < count; i++)
        sum += parts[i].iov_len;
    return sum;
}

#define AT(name, call, buffer_type) \
    ssize_t name(int fd, buffer_type *buffer, size_t count, off_t offset) \
    { \
        REAL(name); \
        HIT(call, fd, offset, (ssize_t)count); \
        return real(fd, buffer, count, offset); \
    }
AT(pread, READ, void)
AT(pread64, READ, void)
AT(pwrite, WRITE, const void)
AT(pwrite64, WRITE, const void)

#define VECTOR_AT(name, call) \
    ssize_t name(int fd, const struct iovec *parts, int count, off_t offset) \
    { \
        REAL(name); \
        HIT(call, fd, offset, total(parts, count)); \
        return real(fd, parts, count, offset); \
    }
VECTOR_AT(preadv, READ)
VECTOR_AT(preadv64, READ)
VECTOR_AT(pwritev, WRITE)
VECTOR_AT(pwritev64, WRITE)

#define VECTOR_AT_WITH_FLAGS(name, call) \
    ssize_t name(int fd, const struct iovec *parts, int count, off_t offset, int flags) \
    { \
        REAL(name); \
        HIT(call, fd, offset, total(parts, count)); \
        return real(fd, parts, count, offset, flags); \
    }
VECTOR_AT_WITH_FLAGS(preadv2, READ)
VECTOR_AT_WITH_FLAGS(preadv64v2, READ)
VECTOR_AT_WITH_FLAGS(pwritev2, WRITE)
VECTOR_AT_WITH_FLAGS(pwritev64v2, WRITE)

ssize_t write(int fd, const void *buffer, size_t count)
{
    REAL(write);
    HIT(WRITE, fd, -1, (ssize_t)count);
    return real(fd, buffer, count);
}

ssize_t writev(int fd, const struct iovec *parts, int count)
{
    REAL(writev);
    HIT(WRITE, fd, -1, total(parts, count));
    return real(fd, parts, count);
}

int fsync(int fd)
{
    REAL(fsync);
    HIT(SYNC, fd, -1, 0);
    return real(fd);
}

int fdatasync(int fd)
{
    REAL(fdatasync);
    HIT(SYNC, fd, -1, 0);
    return real(fd);
}

#define ALLOCATING(name) \
    int name(int fd, off_t offset, off_t length) \
    { \
        REAL(name); \
        int hit = fault(ALLOCATE, fd, -1); \
        return hit > 0 ? hit : hit ? 0 : real(fd, offset, length); \
    }
ALLOCATING(posix_fallocate)
ALLOCATING(posix_fallocate64)

/* Where syncs are pretended no file is opened for writes that sync by themselves either. */
static int without_sync(int flags)
{
    int pretend = cells && cells[SYNC * TARGETS + INDEX].action == PRETEND;
    return pretend ? flags & ~(O_SYNC | O_DSYNC) : flags;
}

static int with_mode(int flags)
{
    return (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE;
}

#define OPENING(name) \
    int name(const char *path, int flags, ...) \
    { \
        REAL(name); \
        mode_t mode = 0; \
        if (with_mode(flags)) { \
            va_list rest; \
            va_start(rest, flags); \
            mode = va_arg(rest, mode_t); \
            va_end(rest); \
        } \
        return real(path, without_sync(flags), mode); \
    }
OPENING(open)
OPENING(open64)
