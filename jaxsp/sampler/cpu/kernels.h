// What the kernels share: vectors of this processor, work for all threads of XLA's pool, errors.

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

// LANES floats fill a register. ROWS rows of two registers of sums leave room for three more registers.
#if defined(__AVX512F__)
#define LANES 16
#define ROWS 12
#elif defined(__AVX__)
#define LANES 8
#define ROWS 6
#elif defined(__aarch64__)
#define LANES 4
#define ROWS 12
#else
#define LANES 4
#define ROWS 6
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define SPINS 4000  // looks at what the others still do before the core is offered to them

// `run(data, item)` for all items, each once.
typedef struct {
  void (*run)(void *data, long item);
  void *data;
  long num_items;
  atomic_long next, num_done;
  atomic_int num_users;
} job;

static inline void work(job *job) {
  long item;
  while ((item = atomic_fetch_add(&job->next, 1)) < job->num_items) {
    job->run(job->data, item);
    atomic_fetch_add(&job->num_done, 1);
  }
}

static inline void leave(job *job) {
  if (atomic_fetch_sub(&job->num_users, 1) == 1) free(job);
}

static void help(void *data) {
  work(data);
  leave(data);
}

static inline int is_error(const XLA_FFI_CallFrame *frame, XLA_FFI_Error *error) {
  if (!error) return 0;
  XLA_FFI_Error_Destroy_Args args = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
  frame->api->XLA_FFI_Error_Destroy(&args);
  return 1;
}

// Threads of the pool; 1 where there is no pool.
static inline long count_threads(const XLA_FFI_CallFrame *frame) {
  int64_t count = 1;
  XLA_FFI_ThreadPool_NumThreads_Args args = {XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, NULL, frame->ctx, &count};
  return is_error(frame, frame->api->XLA_FFI_ThreadPool_NumThreads(&args)) ? 1 : count;
}

// Returns when `run` has returned for every item. The caller works too and waits only for items that others have begun,
// never for a thread to come; a thread that comes late finds nothing left and does not look at `data`.
static inline void for_all(const XLA_FFI_CallFrame *frame, void (*run)(void *, long), void *data, long num_items) {
  long num_threads = num_items > 1 ? count_threads(frame) : 1;
  job *shared = num_threads > 1 ? malloc(sizeof *shared) : NULL;
  if (!shared) {
    for (long item = 0; item < num_items; item++) run(data, item);
    return;
  }
  *shared = (job){run, data, num_items, 0, 0, 1};
  for (long i = 1; i < num_threads && i < num_items; i++) {
    XLA_FFI_ThreadPool_Schedule_Args args = {XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, NULL, frame->ctx, help,
                                             shared};
    atomic_fetch_add(&shared->num_users, 1);
    if (is_error(frame, frame->api->XLA_FFI_ThreadPool_Schedule(&args))) leave(shared);
  }
  work(shared);
  for (long spins = 0; atomic_load(&shared->num_done) < num_items; spins++)
    if (spins > SPINS) sched_yield();
  leave(shared);
}

// XLA asks every handler once which version of the interface it was compiled for.
static inline int is_question(XLA_FFI_CallFrame *frame) {
  if (!frame->extension_start || frame->extension_start->type != XLA_FFI_Extension_Metadata) return 0;
  XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)frame->extension_start)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  return 1;
}

static inline XLA_FFI_Error *fail(const XLA_FFI_CallFrame *frame, const char *message) {
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, message,
                                    XLA_FFI_Error_Code_INVALID_ARGUMENT};
  return frame->api->XLA_FFI_Error_Create(&args);
}

static inline const XLA_FFI_Buffer *argument(const XLA_FFI_CallFrame *frame, long index) {
  return frame->args.args[index];
}

static inline const XLA_FFI_Buffer *result(const XLA_FFI_CallFrame *frame, long index) {
  return frame->rets.rets[index];
}

static inline int has_shape(const XLA_FFI_Buffer *array, XLA_FFI_DataType dtype, long rank, const long *dims) {
  int is_same = array->dtype == dtype && array->rank == rank;
  for (long i = 0; is_same && i < rank; i++) is_same = array->dims[i] == dims[i];
  return is_same;
}
