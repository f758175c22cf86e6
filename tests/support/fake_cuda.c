/* A CUDA driver without a GPU: device memory is this machine's, shared through memory files.

   Work of a stream is queued and done in order. With FAKE_CUDA_LAZY set it is done only when
   somebody asks (synchronize, query), of that stream and of what it waits for alone, so that code
   which forgets to wait, or to have a stream wait for another, finds the old bytes.
   FAKE_CUDA_FAIL=N makes copies fail from the Nth on; FAKE_CUDA_BYTES limits device memory.
   There are FAKE_CUDA_DEVICES of them, one if it is not set. Each has streams and memory of its own:
   work of a stream may touch no other one's, but for copies between two that name both.
   Registered host memory is kept account of: memory that is mapped read-only is refused without the
   flag for it, and always with FAKE_CUDA_WRITABLE; with FAKE_CUDA_STRICT a batch may touch nothing
   but device memory and single registrations, which is where copies are fast. FAKE_CUDA_SLOW=N
   makes each registration take N milliseconds. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <fcntl.h>

typedef uint64_t address;
typedef void *handle;
enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NOT_READY = 600, FAILED = 700, WAIT = 1, COPY, SET, WRITE,
       RECORD, AFTER };

typedef struct event { int done; double at; struct stream *by; } event;
typedef struct op { int kind; address target, source; size_t length; uint64_t value; event *event;
                    struct op *next; } op;
typedef struct stream { op *first, *last; int pulling, device; } stream;
typedef struct allocation { address base; size_t length; int file, own, device;
                            struct allocation *next; } allocation;
typedef struct registration { address base; size_t length; struct registration *next; } registration;
typedef struct { int magic, pid, file; size_t length; char rest[64 - 24]; } ipc_handle;
typedef struct { int order, source_type, source_id, target_type, target_id; unsigned flags; } attributes;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static allocation *allocations;
static registration *registrations;
static size_t used[16];
static int broken, copies;
static __thread int inside; /* the current context: 1 + its device */

static long setting(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text ? atol(text) : otherwise;
}
static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec / 1e9;
}

static int step(op *o) { /* 1: done, 0: has to wait */
  switch (o->kind) {
  case WAIT:
    return *(volatile uint64_t *)o->source >= o->value;
  case COPY:
    if (++copies >= setting("FAKE_CUDA_FAIL", 1L << 40)) broken = 1;
    if (!broken) memmove((void *)o->target, (void *)o->source, o->length);
    return 1;
  case SET:
    memset((void *)o->target, (int)o->value, o->length);
    return 1;
  case WRITE:
    *(volatile uint64_t *)o->target = o->value;
    return 1;
  case RECORD:
    o->event->at = now();
    o->event->done = 1;
    return 1;
  default:
    return o->event->done;
  }
}

static stream *streams[4096];
static int stream_count;

static int advance(stream *s) { /* 1: nothing is left */
  while (s->first && step(s->first)) {
    op *gone = s->first;
    s->first = gone->next;
    free(gone);
  }
  if (!s->first) s->last = NULL;
  return !s->first;
}
static stream usual; /* the default stream, whose handles are 0 and 1 */
static void advance_all(void) {
  for (int round = 0; round < 8; round++) {
    advance(&usual);
    for (int i = 0; i < stream_count; i++)
      if (streams[i]) advance(streams[i]);
  }
}

static stream *named(stream *s) { return (uintptr_t)s <= 1 ? &usual : s; }

static int pull(stream *s) { /* 1: nothing is left; does what it waits for, too */
  if (s->pulling) return 0;
  s->pulling = 1;
  while (s->first) {
    op *o = s->first;
    if (o->kind == AFTER && !o->event->done && o->event->by) pull(o->event->by);
    if (!step(o)) break;
    s->first = o->next;
    free(o);
  }
  if (!s->first) s->last = NULL;
  s->pulling = 0;
  return !s->first;
}
static int work(stream *s) {
  if (getenv("FAKE_CUDA_LAZY")) return pull(s);
  advance_all();
  return advance(s);
}

static allocation *around(address at);
static int is_foreign(address at) { /* another device's memory */
  allocation *found = around(at);
  return found && found->device != inside;
}
static int push(stream *s, op with) {
  s = named(s);
  if (!inside || (s->device && s->device != inside)) return 201; /* invalid context */
  pthread_mutex_lock(&lock);
  op *added = malloc(sizeof(op));
  *added = with;
  added->next = NULL;
  if (s->last) s->last->next = added; else s->first = added;
  s->last = added;
  if (!getenv("FAKE_CUDA_LAZY")) advance_all();
  int code = broken ? FAILED : OK;
  pthread_mutex_unlock(&lock);
  return code;
}

int cuInit(unsigned flags) { return flags; }
int cuDriverGetVersion(int *version) { *version = 13000; return OK; }
int cuDeviceGetCount(int *count) { *count = (int)setting("FAKE_CUDA_DEVICES", 1); return OK; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return OK; }
int cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, 0xA0 + device, 16); return OK; }
int cuDeviceGetAttribute(int *value, int name, int device) {
  (void)device;
  *value = name == 113 && !getenv("FAKE_CUDA_WRITABLE");
  return OK;
}
int cuDevicePrimaryCtxRetain(handle *context, int device) {
  *context = (handle)(uintptr_t)(device + 1);
  return OK;
}
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return OK; }
int cuCtxSetCurrent(handle context) { inside = (int)(uintptr_t)context; return OK; }
static __thread int below[8], depth;
int cuCtxPushCurrent_v2(handle context) {
  if (depth == 8) abort();
  below[depth++] = inside;
  return cuCtxSetCurrent(context);
}
int cuCtxPopCurrent_v2(handle *popped) {
  if (!depth) return 201;
  *popped = (handle)(uintptr_t)inside;
  inside = below[--depth];
  return OK;
}
int cuCtxGetStreamPriorityRange(int *least, int *most) { *least = 0; *most = -5; return OK; }
int cuMemGetInfo_v2(size_t *unused, size_t *total) {
  *total = setting("FAKE_CUDA_BYTES", 1L << 32);
  *unused = *total - used[inside];
  return OK;
}

static int map(address *base, int file, size_t length, int own) {
  void *at = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (at == MAP_FAILED) return NO_MEMORY;
  allocation *added = malloc(sizeof(allocation));
  *added = (allocation){(address)at, length, file, own, inside, allocations};
  allocations = added;
  *base = (address)at;
  return OK;
}
int cuMemAlloc_v2(address *base, size_t length) {
  if (!inside) return 201;
  if (!length) return INVALID;
  if (used[inside] + length > (size_t)setting("FAKE_CUDA_BYTES", 1L << 32)) return NO_MEMORY;
  int file = memfd_create("fake-cuda", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, length)) return NO_MEMORY;
  used[inside] += length;
  int code = map(base, file, length, 1);
  if (code == OK) memset((void *)*base, 0xDD, length < (1 << 20) ? length : 1 << 20);
  return code;
}
static allocation *around(address at) {
  for (allocation *a = allocations; a; a = a->next)
    if (at >= a->base && at < a->base + a->length) return a;
  return NULL;
}
static int drop(address base, int own) {
  for (allocation **a = &allocations; *a; a = &(*a)->next)
    if ((*a)->base == base && (*a)->own == own) {
      allocation *gone = *a;
      *a = gone->next;
      munmap((void *)gone->base, gone->length);
      close(gone->file);
      if (own) used[gone->device] -= gone->length;
      free(gone);
      return OK;
    }
  return INVALID;
}
int cuMemFree_v2(address base) { return drop(base, 1); }
int cuMemGetAddressRange_v2(address *base, size_t *length, address at) {
  allocation *found = around(at);
  if (!found) return 500;
  if (base) *base = found->base;
  if (length) *length = found->length;
  return OK;
}
static int writable(address at) {
  FILE *maps = fopen("/proc/self/maps", "r");
  char line[512], may[5];
  unsigned long from, to;
  int found = 0;
  while (maps && fgets(line, sizeof line, maps))
    if (sscanf(line, "%lx-%lx %4s", &from, &to, may) == 3 && at >= from && at < to)
      found = may[1] == 'w';
  if (maps) fclose(maps);
  return found;
}
static int is_registered(address at, size_t length) {
  for (registration *r = registrations; r; r = r->next)
    if (at >= r->base && at + length <= r->base + r->length) return 1;
  return 0;
}
int cuMemHostRegister_v2(void *at, size_t length, unsigned flags) {
  usleep(1000 * setting("FAKE_CUDA_SLOW", 0));
  if ((uintptr_t)at % 4096) return INVALID;
  if (flags & 8 ? getenv("FAKE_CUDA_WRITABLE") != NULL : !writable((address)at)) return 801;
  pthread_mutex_lock(&lock);
  int again = 0;
  for (registration *r = registrations; r; r = r->next)
    again |= (address)at < r->base + r->length && r->base < (address)at + length;
  if (!again) {
    registration *added = malloc(sizeof(registration));
    *added = (registration){(address)at, length, registrations};
    registrations = added;
  }
  pthread_mutex_unlock(&lock);
  return again ? 712 : OK; /* already registered */
}
int cuMemHostUnregister(void *at) {
  int code = 713; /* not registered */
  pthread_mutex_lock(&lock);
  for (registration **r = &registrations; *r; r = &(*r)->next)
    if ((*r)->base == (address)at) {
      registration *gone = *r;
      *r = gone->next;
      free(gone);
      code = OK;
      break;
    }
  pthread_mutex_unlock(&lock);
  return code;
}
int cuPointerGetAttribute(int *value, int name, address at) {
  if (!around(at)) return INVALID;
  *value = name == 10 && !getenv("FAKE_CUDA_VIRTUAL");
  return OK;
}
int cuMemcpyAsync(address target, address source, size_t length, stream *s) {
  if (is_foreign(target) || is_foreign(source)) return INVALID;
  return push(s, (op){.kind = COPY, .target = target, .source = source, .length = length});
}
int cuMemcpyPeerAsync(address target, handle to, address source, handle from, size_t length,
                      stream *s) {
  allocation *at = around(target), *of = around(source);
  if (!at || !of || at->device != (int)(uintptr_t)to || of->device != (int)(uintptr_t)from)
    return INVALID;
  return push(s, (op){.kind = COPY, .target = target, .source = source, .length = length});
}
int cuDeviceCanAccessPeer(int *may, int device, int other) {
  *may = device != other && !getenv("FAKE_CUDA_APART");
  return OK;
}
int cuCtxEnablePeerAccess(handle context, unsigned flags) {
  static char enabled[16][16];
  int other = (int)(uintptr_t)context;
  if (flags || other == inside) return INVALID;
  if (enabled[inside][other]++) return 704; /* already enabled */
  return OK;
}
int cuMemsetD8Async(address target, unsigned char value, size_t length, stream *s) {
  if (is_foreign(target)) return INVALID;
  return push(s, (op){.kind = SET, .target = target, .length = length, .value = value});
}
static int copy_batch(address *targets, address *sources, size_t *lengths, size_t count,
                      attributes *how, size_t *which, size_t kinds, size_t *failed, stream *s) {
  if (!count || kinds != 1 || which[0] || how->order < 1 || how->order > 3 || how->flags) {
    *failed = 0;
    return INVALID;
  }
  int code = OK;
  for (size_t i = 0; i < count && getenv("FAKE_CUDA_STRICT"); i++)
    if ((!around(targets[i]) && !is_registered(targets[i], lengths[i])) ||
        (!around(sources[i]) && !is_registered(sources[i], lengths[i])))
      return INVALID;
  for (size_t i = 0; i < count && code == OK; i++)
    code = cuMemcpyAsync(targets[i], sources[i], lengths[i], s);
  return code;
}
int cuGetProcAddress_v2(const char *name, handle *found, int version, uint64_t flags, int *status) {
  (void)flags;
  int there = !strcmp(name, "cuMemcpyBatchAsync") && version == 12080 && !getenv("FAKE_CUDA_OLD");
  *found = there ? (handle)copy_batch : NULL;
  *status = !there;
  return OK;
}
int cuStreamCreateWithPriority(handle *made, unsigned flags, int priority) {
  (void)flags; (void)priority;
  pthread_mutex_lock(&lock);
  stream *s = calloc(1, sizeof(stream));
  s->device = inside;
  if (stream_count == 4096) abort();
  streams[stream_count++] = s;
  *made = s;
  pthread_mutex_unlock(&lock);
  return OK;
}
int cuStreamDestroy_v2(stream *s) {
  pthread_mutex_lock(&lock);
  for (int i = 0; i < stream_count; i++)
    if (streams[i] == s && s->first == NULL) {
      streams[i] = streams[--stream_count];
      free(s);
      break;
    }
  pthread_mutex_unlock(&lock);
  return OK;
}
int cuStreamSynchronize(stream *s) {
  s = named(s);
  for (;;) {
    pthread_mutex_lock(&lock);
    int done = work(s), code = broken ? FAILED : OK;
    pthread_mutex_unlock(&lock);
    if (done || code) return code;
    usleep(100);
  }
}
int cuStreamWaitEvent(stream *s, event *e, unsigned flags) {
  (void)flags;
  return push(s, (op){.kind = AFTER, .event = e});
}
int cuStreamWriteValue64_v2(stream *s, address target, uint64_t value, unsigned flags) {
  (void)flags;
  return push(s, (op){.kind = WRITE, .target = target, .value = value});
}
int cuStreamWaitValue64_v2(stream *s, address source, uint64_t value, unsigned flags) {
  (void)flags;
  return push(s, (op){.kind = WAIT, .source = source, .value = value});
}
int cuEventCreate(handle *made, unsigned flags) {
  (void)flags;
  event *e = calloc(1, sizeof(event));
  e->done = 1; /* an event that was never recorded is done */
  *made = e;
  return OK;
}
int cuEventDestroy_v2(event *e) { (void)e; return OK; } /* a stream may still wait for it */
int cuEventRecord(event *e, stream *s) {
  e->done = 0;
  e->by = named(s);
  return push(s, (op){.kind = RECORD, .event = e});
}
int cuEventQuery(event *e) {
  pthread_mutex_lock(&lock);
  if (e->by && !e->done) work(e->by);
  int code = broken ? FAILED : e->done ? OK : NOT_READY;
  pthread_mutex_unlock(&lock);
  return code;
}
int cuEventSynchronize(event *e) {
  int code;
  while ((code = cuEventQuery(e)) == NOT_READY) usleep(100);
  return code;
}
int cuEventElapsedTime(float *milliseconds, event *from, event *to) {
  *milliseconds = (to->at - from->at) * 1e3;
  return OK;
}
int cuIpcGetMemHandle(ipc_handle *made, address base) {
  allocation *found = around(base);
  if (!found || found->base != base) return INVALID;
  memset(made, 0, sizeof *made);
  made->magic = 0xCDA;
  made->pid = getpid();
  made->file = found->file;
  made->length = found->length;
  return OK;
}
int cuIpcOpenMemHandle_v2(address *base, ipc_handle given, unsigned flags) {
  char path[64];
  if (given.magic != 0xCDA || flags != 1) return INVALID;
  if (given.pid == getpid()) return 201; /* not in the exporting process */
  snprintf(path, sizeof path, "/proc/%d/fd/%d", given.pid, given.file);
  int file = open(path, O_RDWR | O_CLOEXEC);
  return file < 0 ? 400 : map(base, file, given.length, 0);
}
int cuIpcCloseMemHandle(address base) { return drop(base, 0); }
int cuGetErrorName(int code, const char **name) {
  *name = code == FAILED ? "CUDA_ERROR_ILLEGAL_ADDRESS" : code == NO_MEMORY
    ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 400 ? "CUDA_ERROR_INVALID_HANDLE" : "CUDA_ERROR";
  return OK;
}
