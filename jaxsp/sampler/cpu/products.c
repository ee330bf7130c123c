// Products of some rows with large matrices: y = x w, for several w of one x in one call.
//
// x is [rows, num_in] and y [rows, num_out], row by row. w comes in panels, [num_panels, num_in, PANEL]: PANEL columns
// stand together, so that decoding reads all weights from the first byte to the last, once. Columns past num_out are
// padding. A tile is some rows times one panel or more; its sums stay in registers. Weights are float32, or bfloat16,
// which is the upper half of it: half as many bytes to read, and the products and sums are float32's all the same.
//
// Every number of y is a sum over blocks of places, in their order, of sums over the places of a block, in their order,
// whatever the number of rows and threads: a row's result does not depend on its batch mates.

#include "kernels.h"

#define PANEL (2 * LANES)
#define MOST_PANELS 4         // memory is read faster in several streams, and few rows leave registers for them
#define BLOCK 640             // places: the cache next to the core holds as many of a whole tile's x
#define TILES_AT_ONCE 16      // their x stays in the next larger cache while all panels of a chunk pass by
#define MOST_PRODUCTS 8
#define CHUNKS_PER_THREAD 4   // of the panels: what a thread that is late leaves to the others

typedef unsigned short halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef unsigned words __attribute__((vector_size(4 * LANES)));

typedef struct {
  const char *w;
  float *y;
  long num_out, num_panels;
} product;

typedef struct {
  const float *x;
  float *packed;  // x tile by tile, and in each place by place
  long rows, num_tiles, num_in, num_blocks, num_panels, panels_per_chunk;
  int weight_bytes;  // of one weight: 4 or 2
  product products[MOST_PRODUCTS];
} task;

int jaxsp_cpu_panel(void) { return PANEL; }

int jaxsp_cpu_lanes(void) { return LANES; }

static long part(long whole, long index, long count) { return whole * index / count; }

static void pack(void *data, long t) {
  task *task = data;
  long first = part(task->rows, t, task->num_tiles), end = part(task->rows, t + 1, task->num_tiles);
  float *to = task->packed + first * task->num_in;
  for (long i = 0; i < task->num_in; i++)
    for (long r = first; r < end; r++) *to++ = task->x[r * task->num_in + i];
}

INLINE vec weights(const char *w, const int bytes) {
  return bytes == 4 ? *(const vec *)w : (vec)(__builtin_convertvector(*(const halves *)w, words) << 16);
}

// The sums of a tile over `length` places. `w` is that of the first panel, the next one stands `apart` bytes on.
// Meanwhile `stride` bytes a place, from `ahead` on and in every panel, come to the cache.
INLINE void tile(const int rows, const int panels, const int bytes, const float *x, const char *w, long apart,
                 long length, const char *ahead, long stride, float sums[][ROWS][PANEL]) {
  vec sum[ROWS][2 * MOST_PANELS], own[2 * MOST_PANELS];
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
    for (int c = 0; c < 2 * panels; c++) sum[r][c] = (vec){0};
  for (long i = 0; i < length; i++, w += PANEL * bytes, x += rows, ahead += stride) {
#pragma GCC unroll 4
    for (int p = 0; p < panels; p++) {
      __builtin_prefetch(ahead + p * apart, 0, 2);
      if (stride > 64) __builtin_prefetch(ahead + p * apart + 64, 0, 2);
    }
#pragma GCC unroll 8
    for (int c = 0; c < 2 * panels; c++) own[c] = weights(w + c / 2 * apart + c % 2 * LANES * bytes, bytes);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
      for (int c = 0; c < 2 * panels; c++) sum[r][c] += x[r] * own[c];
  }
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
    for (int c = 0; c < 2 * panels; c++) *(vec *)(sums[c / 2][r] + c % 2 * LANES) = sum[r][c];
}

static void any_tile(int rows, int panels, int bytes, const float *x, const char *w, long apart, long length,
                     const char *ahead, long stride, float sums[][ROWS][PANEL]) {
#define TILE(n, p, b) \
  if (n * p <= ROWS && rows == n && panels == p && bytes == b) tile(n, p, b, x, w, apart, length, ahead, stride, sums);
#define TILES(n) TILE(n, 1, 4) TILE(n, 2, 4) TILE(n, 4, 4) TILE(n, 1, 2) TILE(n, 2, 2) TILE(n, 4, 2)
  TILES(1) TILES(2) TILES(3) TILES(4) TILES(5) TILES(6) TILES(7) TILES(8) TILES(9) TILES(10) TILES(11) TILES(12)
}

// The rows of some tiles in `panels` panels from the one of this index on. `is_last`: no more of this w is to be read.
static void strip(const task *task, const product *product, long index, int panels, long first_tile, long end_tile,
                  int is_last) {
  const long place = PANEL * task->weight_bytes, apart = task->num_in * place;  // bytes
  const char *w = product->w + index * apart;
  float sums[MOST_PANELS][ROWS][PANEL];
  for (long b = 0; b < task->num_blocks; b++) {
    long begin = part(task->num_in, b, task->num_blocks), length = part(task->num_in, b + 1, task->num_blocks) - begin;
    int has_next = !is_last || b + 1 < task->num_blocks;
    long stride = has_next ? place / (end_tile - first_tile) : 0;
    for (long t = first_tile; t < end_tile; t++) {
      long first = part(task->rows, t, task->num_tiles), rows = part(task->rows, t + 1, task->num_tiles) - first;
      const char *next = b + 1 < task->num_blocks ? w + (begin + length) * place : w + panels * apart;
      const char *ahead = has_next ? next + (t - first_tile) * length * stride : w;
      any_tile(rows, panels, task->weight_bytes, task->packed + first * task->num_in + begin * rows, w + begin * place,
               apart, length, ahead, stride, sums);
      for (int p = 0; p < panels; p++) {
        long column = (index + p) * PANEL, width = product->num_out - column;
        if (width > PANEL) width = PANEL;
        for (long r = 0; r < rows; r++) {
          float *y = product->y + (first + r) * product->num_out + column;
          if (b == 0)
            memcpy(y, sums[p][r], width * sizeof(float));
          else
            for (long c = 0; c < width; c++) y[c] += sums[p][r][c];
        }
      }
    }
  }
}

static void multiply(void *data, long chunk) {
  const task *task = data;
  long rows_of_tile = (task->rows + task->num_tiles - 1) / task->num_tiles;
  int most = rows_of_tile * 4 <= ROWS ? 4 : rows_of_tile * 2 <= ROWS ? 2 : 1;
  long begin = chunk * task->panels_per_chunk, end = begin + task->panels_per_chunk;
  if (end > task->num_panels) end = task->num_panels;
  for (long tile = 0; tile < task->num_tiles; tile += TILES_AT_ONCE) {
    long end_tile = tile + TILES_AT_ONCE < task->num_tiles ? tile + TILES_AT_ONCE : task->num_tiles;
    for (long index = begin, panels; index < end; index += panels) {
      const product *product = task->products;
      long own = index;
      for (; own >= product->num_panels; product++) own -= product->num_panels;
      long left = product->num_panels - own < end - index ? product->num_panels - own : end - index;
      for (panels = most; panels > left;) panels /= 2;
      strip(task, product, own, panels, tile, end_tile, panels == left);
    }
  }
}

static int go_together(const XLA_FFI_CallFrame *frame) {
  long num_products = frame->rets.size - 1;
  if (frame->args.size != frame->rets.size || num_products < 1 || argument(frame, 0)->rank != 2) return 0;
  const XLA_FFI_Buffer *x = argument(frame, 0), *room = result(frame, num_products);
  const long rows = x->dims[0], num_in = x->dims[1], of_x[] = {rows, num_in};
  const XLA_FFI_DataType of_weights = argument(frame, 1)->dtype;
  if (of_weights != XLA_FFI_DataType_F32 && of_weights != XLA_FFI_DataType_BF16) return 0;
  if (!rows || !num_in || !has_shape(x, XLA_FFI_DataType_F32, 2, of_x) ||
      !has_shape(room, XLA_FFI_DataType_F32, 2, of_x))
    return 0;
  for (long i = 0; i < num_products; i++) {
    const XLA_FFI_Buffer *w = argument(frame, i + 1), *y = result(frame, i);
    if (y->rank != 2 || !y->dims[1]) return 0;
    const long num_out = y->dims[1], of_y[] = {rows, num_out}, of_w[] = {(num_out + PANEL - 1) / PANEL, num_in, PANEL};
    if (!has_shape(y, XLA_FFI_DataType_F32, 2, of_y) || !has_shape(w, of_weights, 3, of_w)) return 0;
  }
  return 1;
}

// (x [rows, num_in], w [num_panels, num_in, PANEL]...) -> (y [rows, num_out]..., room for x), none empty,
// all float32 but that w may be bfloat16.
XLA_FFI_Error *jaxsp_cpu_products(XLA_FFI_CallFrame *frame) {
  if (is_question(frame)) return NULL;
  if (!go_together(frame)) return fail(frame, "jaxsp_cpu_products: x, w and y do not go together");
  const XLA_FFI_Buffer *x = argument(frame, 0);
  long num_products = frame->rets.size - 1, rows = x->dims[0], num_in = x->dims[1];
  if (num_products > MOST_PRODUCTS) return fail(frame, "jaxsp_cpu_products: too many w");
  long most_rows = rows <= ROWS ? ROWS / 2 : ROWS;  // few rows wait for memory: two panels are two streams of it
  task task = {x->data, result(frame, num_products)->data, rows, (rows + most_rows - 1) / most_rows, num_in,
               (num_in + BLOCK - 1) / BLOCK, 0, 0, argument(frame, 1)->dtype == XLA_FFI_DataType_F32 ? 4 : 2, {{0}}};
  for (long i = 0; i < num_products; i++) {
    const XLA_FFI_Buffer *w = argument(frame, i + 1), *y = result(frame, i);
    task.products[i] = (product){w->data, y->data, y->dims[1], w->dims[0]};
    task.num_panels += w->dims[0];
  }
  long most_chunks = count_threads(frame) * CHUNKS_PER_THREAD;
  task.panels_per_chunk = (task.num_panels + most_chunks - 1) / most_chunks;
  if (task.num_tiles <= TILES_AT_ONCE)  // it takes less time than to tell the other threads of it
    for (long t = 0; t < task.num_tiles; t++) pack(&task, t);
  else
    for_all(frame, pack, &task, task.num_tiles);
  for_all(frame, multiply, &task, (task.num_panels + task.panels_per_chunk - 1) / task.panels_per_chunk);
  return NULL;
}
