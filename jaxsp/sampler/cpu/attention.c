// Attention in the pages of the cache: writes keys and values of new tokens, which then look at all before them in their
// row, and at themselves. One new token of a row is decoding; several are a prompt, or a part of it.
//
// A page holds, for each kv head, page_tokens keys (or values) of head_dim numbers. Nothing but what a row has is read.

#include "kernels.h"

#define MOST_HEADS 4  // query heads that look at a key while it is in a register
#define MOST_VECS (ROWS / 3)  // registers of a head's sums; all of them stay in registers
#define BLOCK 256    // tokens whose scores exist at one time
#define QUERIES 16   // new tokens of an item of work

typedef struct {
  const float *q, *k, *v;
  float *out, *keys, *values;
  const int *table, *start, *count;
  long num_new, num_kv_heads, group, head_dim, page_tokens, row_pages;
} task;

static float *at(const task *task, float *cache, long row, long head, long position) {
  long page = task->table[row * task->row_pages + position / task->page_tokens];
  return cache + ((page * task->num_kv_heads + head) * task->page_tokens + position % task->page_tokens) * task->head_dim;
}

// Tokens from `position` on that stand in one page and before `end`.
static long in_page(const task *task, long position, long end) {
  long rest = task->page_tokens - position % task->page_tokens;
  return rest < end - position ? rest : end - position;
}

INLINE float total(vec v) {
  typedef float four __attribute__((vector_size(16)));
  four f[LANES / 4];
  memcpy(f, &v, sizeof v);
  for (int half = LANES / 8; half; half /= 2)
    for (int i = 0; i < half; i++) f[i] += f[i + half];
  return (f[0][0] + f[0][2]) + (f[0][1] + f[0][3]);
}

// exp(x) for x <= 0, within 2 units in the last place, and 0 below -87: 2^n times a polynomial of the rest (Moshier,
// Cephes, expf).
INLINE vec exponential(vec x) {
  typedef int ints __attribute__((vector_size(4 * LANES), may_alias));
  const float shifter = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, which the last bits then hold
  ints is_tiny = x < -87.0f;
  x = (vec)(~is_tiny & (ints)x);
  vec shifted = x * 1.44269504f + shifter, n = shifted - shifter;
  vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  ints power = ((ints)shifted - 0x4B400000 + 127) << 23;
  return (vec)(~is_tiny & (ints)(p * (vec)power));
}

// Brings the numbers of a page and head that are read soon to the cache: they stand anywhere. After the first of several
// new tokens they are there.
static void expect(const task *task, const float *numbers) {
  if (task->num_new > 1) return;
  for (long i = 0; i < task->page_tokens * task->head_dim; i += 16) __builtin_prefetch(numbers + i, 0, 2);
}

// Scores of `heads` query heads against the keys of a block, and the largest of each.
INLINE void look(const task *task, const int heads, const float *q, long row, long head, long begin, long end,
                 float scale, float scores[][BLOCK + LANES], float *most) {
  for (int g = 0; g < heads; g++) most[g] = -__builtin_inff();
  for (long position = begin, count; position < end; position += count) {
    const float *key = at(task, task->keys, row, head, position);
    count = in_page(task, position, end);
    if (position + count < end) expect(task, at(task, task->keys, row, head, position + count));
    expect(task, at(task, task->values, row, head, position));
    for (long t = position; t < position + count; t++, key += task->head_dim) {
      vec sum[MOST_HEADS];
#pragma GCC unroll 4
      for (int g = 0; g < heads; g++) sum[g] = (vec){0};
      for (long c = 0; c < task->head_dim; c += LANES) {
        vec own = *(const vec *)(key + c);
#pragma GCC unroll 4
        for (int g = 0; g < heads; g++) sum[g] += *(const vec *)(q + g * task->head_dim + c) * own;
      }
#pragma GCC unroll 4
      for (int g = 0; g < heads; g++) {
        float score = total(sum[g]) * scale;
        scores[g][t - begin] = score;
        most[g] = score > most[g] || score != score ? score : most[g];
      }
    }
  }
}

// `vecs` registers of `out` of each head, from place `offset` on: times `decay`, plus the weighted values of a block.
INLINE void weigh(const task *task, const int heads, const int vecs, float weights[][BLOCK + LANES], long row, long head,
                  long begin, long end, long offset, const float *decay, float *out) {
  vec sum[MOST_HEADS][MOST_VECS];
#pragma GCC unroll 4
  for (int g = 0; g < heads; g++)
#pragma GCC unroll 4
    for (int c = 0; c < vecs; c++)
      sum[g][c] = *(const vec *)(out + g * task->head_dim + offset + c * LANES) * decay[g];
  for (long position = begin, count; position < end; position += count) {
    const float *value = at(task, task->values, row, head, position) + offset;
    count = in_page(task, position, end);
    for (long t = position; t < position + count; t++, value += task->head_dim)
#pragma GCC unroll 4
      for (int c = 0; c < vecs; c++)
#pragma GCC unroll 4
        for (int g = 0; g < heads; g++) sum[g][c] += weights[g][t - begin] * *(const vec *)(value + c * LANES);
  }
#pragma GCC unroll 4
  for (int g = 0; g < heads; g++)
#pragma GCC unroll 4
    for (int c = 0; c < vecs; c++) *(vec *)(out + g * task->head_dim + offset + c * LANES) = sum[g][c];
}

// softmax(q keys / sqrt(head_dim)) values over the `length` first tokens of a row, for `heads` query heads of a kv head,
// block by block with a running maximum (Milakov and Gimelshein 2018, arXiv 1805.02867).
INLINE void some_heads(const task *task, const int heads, const float *q, long row, long head, long length, float *out) {
  const long size = task->head_dim;
  const float scale = 1 / __builtin_sqrtf(size);
  float most[MOST_HEADS], sum[MOST_HEADS], decay[MOST_HEADS], own[MOST_HEADS], scores[MOST_HEADS][BLOCK + LANES];
  for (int g = 0; g < heads; g++) most[g] = -__builtin_inff(), sum[g] = 0;
  memset(out, 0, heads * size * sizeof(float));
  for (long begin = 0; begin < length; begin += BLOCK) {
    long end = begin + BLOCK < length ? begin + BLOCK : length, offset = 0;
    look(task, heads, q, row, head, begin, end, scale, scores, own);
    for (int g = 0; g < heads; g++) {
      float before = most[g];
      most[g] = own[g] > before || own[g] != own[g] ? own[g] : before;
      for (long t = end - begin; t % LANES; t++) scores[g][t] = -__builtin_inff();
      vec numerators = {0};
      for (long t = 0; t < end - begin; t += LANES)
        numerators += *(vec *)(scores[g] + t) = exponential(*(vec *)(scores[g] + t) - most[g]);
      decay[g] = exponential((vec){0} + (before - most[g]))[0];
      sum[g] = sum[g] * decay[g] + total(numerators);
    }
    for (; offset + MOST_VECS * LANES <= size; offset += MOST_VECS * LANES)
      weigh(task, heads, MOST_VECS, scores, row, head, begin, end, offset, decay, out);
    for (; offset < size; offset += LANES) weigh(task, heads, 1, scores, row, head, begin, end, offset, decay, out);
  }
  for (int g = 0; g < heads; g++)
    for (long c = 0; c < size; c++) out[g * size + c] /= sum[g];
}

// Heads `g` and on, as many as can go together, of a kv head's group; returns how many.
static long next_heads(const task *task, long g, const float *q, long row, long head, long length, float *out) {
  switch (task->group - g) {
    case 1: return some_heads(task, 1, q, row, head, length, out), 1;
    case 2: return some_heads(task, 2, q, row, head, length, out), 2;
    case 3: return some_heads(task, 3, q, row, head, length, out), 3;
    default: return some_heads(task, 4, q, row, head, length, out), 4;
  }
}

// Some new tokens of one row and one kv head, with all query heads that read it.
static void attend(void *data, long item) {
  const task *task = data;
  long num_parts = (task->num_new + QUERIES - 1) / QUERIES, first = item % num_parts * QUERIES;
  long head = item / num_parts % task->num_kv_heads, row = item / num_parts / task->num_kv_heads;
  long size = task->group * task->head_dim;
  for (long t = first; t < first + QUERIES && t < task->num_new; t++) {
    long place = ((row * task->num_new + t) * task->num_kv_heads + head) * size;
    if (t >= task->count[row])
      memset(task->out + place, 0, size * sizeof(float));
    else
      for (long g = 0, own = place; g < task->group; own = place + g * task->head_dim)
        g += next_heads(task, g, task->q + own, row, head, task->start[row] + t + 1, task->out + own);
  }
}

// Writes the new keys and values of a row.
static void keep(const task *task, long row) {
  const long size = task->head_dim;
  for (long t = 0; t < task->count[row]; t++)
    for (long head = 0; head < task->num_kv_heads; head++) {
      long from = ((row * task->num_new + t) * task->num_kv_heads + head) * size;
      memcpy(at(task, task->keys, row, head, task->start[row] + t), task->k + from, size * sizeof(float));
      memcpy(at(task, task->values, row, head, task->start[row] + t), task->v + from, size * sizeof(float));
    }
}

// Whether the new tokens of every row come to pages that there are, and so do all before them.
static int are_in_pages(const task *task, long num_rows, long num_pages) {
  for (long row = 0; row < num_rows; row++) {
    long end = (long)task->start[row] + task->count[row];
    if (task->count[row] <= 0) continue;
    if (task->start[row] < 0 || task->count[row] > task->num_new || end > task->row_pages * task->page_tokens) return 0;
    for (long i = 0; i * task->page_tokens < end; i++) {
      int page = task->table[row * task->row_pages + i];
      if (page < 0 || page >= num_pages) return 0;
    }
  }
  return 1;
}

static int go_together(const XLA_FFI_CallFrame *frame) {
  const XLA_FFI_Buffer *q = argument(frame, 0), *k = argument(frame, 1), *keys = argument(frame, 3);
  const XLA_FFI_Buffer *table = argument(frame, 5);
  if (q->rank != 4 || k->rank != 4 || keys->rank != 4 || table->rank != 2) return 0;
  const long rows = q->dims[0], num_new = q->dims[1], num_kv_heads = k->dims[2], page_tokens = keys->dims[2];
  const long head_dim = q->dims[3], of_q[] = {rows, num_new, q->dims[2], head_dim};
  const long of_k[] = {rows, num_new, num_kv_heads, head_dim}, of_table[] = {rows, table->dims[1]};
  const long of_cache[] = {keys->dims[0], num_kv_heads, page_tokens, head_dim};
  if (!num_kv_heads || q->dims[2] % num_kv_heads || !page_tokens || !head_dim || head_dim % LANES) return 0;
  for (long i = 0; i < 3; i++)
    if (!has_shape(argument(frame, i), XLA_FFI_DataType_F32, 4, i ? of_k : of_q) ||
        !has_shape(result(frame, i), XLA_FFI_DataType_F32, 4, i ? of_cache : of_q))
      return 0;
  return has_shape(keys, XLA_FFI_DataType_F32, 4, of_cache) &&
         has_shape(argument(frame, 4), XLA_FFI_DataType_F32, 4, of_cache) &&
         has_shape(table, XLA_FFI_DataType_S32, 2, of_table) &&
         has_shape(argument(frame, 6), XLA_FFI_DataType_S32, 1, of_q) &&
         has_shape(argument(frame, 7), XLA_FFI_DataType_S32, 1, of_q);
}

// (q [B, L, N, H], k [B, L, K, H], v, keys [G, K, T, H], values, table [B, W], start [B], count [B]) -> (out [B, L, N, H],
// keys, values), the last two in place; H a multiple of LANES. Of a row, the first `count` of L are new tokens, which
// stand at `start` and on; `out` of the others is 0.
XLA_FFI_Error *jaxsp_cpu_attention(XLA_FFI_CallFrame *frame) {
  if (is_question(frame)) return NULL;
  if (frame->args.size != 8 || frame->rets.size != 3) return fail(frame, "jaxsp_cpu_attention: 8 arguments, 3 results");
  if (!go_together(frame)) return fail(frame, "jaxsp_cpu_attention: shapes do not go together");
  const XLA_FFI_Buffer *q = argument(frame, 0), *keys = argument(frame, 3), *table = argument(frame, 5);
  if (result(frame, 1)->data != keys->data || result(frame, 2)->data != argument(frame, 4)->data)
    return fail(frame, "jaxsp_cpu_attention: the cache must be updated in place");
  long num_rows = q->dims[0], num_new = q->dims[1], num_kv_heads = keys->dims[1];
  task task = {
      q->data, argument(frame, 1)->data, argument(frame, 2)->data, result(frame, 0)->data, keys->data,
      argument(frame, 4)->data, table->data, argument(frame, 6)->data, argument(frame, 7)->data,
      num_new, num_kv_heads, q->dims[2] / num_kv_heads, q->dims[3], keys->dims[2], table->dims[1]};
  if (!are_in_pages(&task, num_rows, keys->dims[0]))
    return fail(frame, "jaxsp_cpu_attention: a token stands in no page of the cache");
  for (long row = 0; row < num_rows; row++) keep(&task, row);
  for_all(frame, attend, &task, num_rows * num_kv_heads * ((num_new + QUERIES - 1) / QUERIES));
  return NULL;
}
