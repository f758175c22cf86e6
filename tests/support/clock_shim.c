/* A wall clock that is moved while a process runs; see wall_clock.py.

   CLOCK_SHIM_CONTROL is a file that holds the seconds to add, as a 64-bit integer. Whoever maps
   that file moves the clock. Clocks that only go forward are as they are. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int64_t *added;

__attribute__((constructor)) static void start(void)
{
    const char *control = getenv("CLOCK_SHIM_CONTROL");
    if (!control)
        return;
    int fd = open(control, O_RDONLY | O_CLOEXEC);
    void *found = fd < 0 ? MAP_FAILED : mmap(0, sizeof *added, PROT_READ, MAP_SHARED, fd, 0);
    if (found == MAP_FAILED) {
        fprintf(stderr, "clock shim: %s cannot be mapped\n", control);
        abort();
    }
    close(fd);
    added = found;
}

static int64_t seconds(void)
{
    return added ? __atomic_load_n(added, __ATOMIC_SEQ_CST) : 0;
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) \
        real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

int clock_gettime(clockid_t clock, struct timespec *now)
{
    REAL(clock_gettime);
    int result = real(clock, now);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += seconds();
    return result;
}

int gettimeofday(struct timeval *now, void *zone)
{
    REAL(gettimeofday);
    int result = real(now, zone);
    if (!result)
        now->tv_sec += seconds();
    return result;
}

time_t time(time_t *where)
{
    REAL(time);
    time_t now = real(0) + seconds();
    if (where)
        *where = now;
    return now;
}
