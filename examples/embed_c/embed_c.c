/* Serve one layer of attention from an index, in C: the whole of what an engine adds.
 *
 *   cc embed_c.c $(pkg-config --cflags --libs sqz) -lm -o embed_c && ./embed_c book.sqz
 *
 * An engine would pass the queries of its own model; this program makes some up, asks once densely
 * and once with an eighth of the bytes, and prints how far the answers are apart and what was read.
 */
#include <math.h>
#include <sqz/sqz.h>
#include <stdio.h>
#include <stdlib.h>

static void check(sqz_status status) {
  if (status == SQZ_OK) return;
  fprintf(stderr, "embed_c: %s: %s\n", sqz_status_string(status), sqz_last_error());
  exit(1);
}

/* Attention of q [1, heads, dim] over layer 0; fills out and returns the fraction of bytes read. */
static double attend(sqz_index* index, sqz_selector selector, double budget, float* q, float* out,
                     int64_t heads, int64_t dim) {
  int64_t q_shape[3] = {1, heads, dim}, lse_shape[2] = {1, heads};
  float* lse = malloc((size_t)heads * sizeof *lse);
  sqz_tensor q_tensor = {q, 1, 0, 3, 2, 32, 1, q_shape, NULL, 0};
  sqz_tensor out_tensor = {out, 1, 0, 3, 2, 32, 1, q_shape, NULL, 0};
  sqz_tensor lse_tensor = {lse, 1, 0, 2, 2, 32, 1, lse_shape, NULL, 0};

  sqz_session_options options = {.struct_size = sizeof options};
  options.selector = selector;
  options.budget = budget;
  sqz_session* session;
  check(sqz_session_create(index, &options, &session));

  sqz_attend_args args = {.struct_size = sizeof args};
  args.layer = 0;
  args.q = &q_tensor;
  args.out = &out_tensor;
  args.lse = &lse_tensor;
  check(sqz_attend(session, &args));

  sqz_stats stats = {.struct_size = sizeof stats};
  check(sqz_session_stats(session, 0, -1, &stats));
  sqz_session_destroy(session);
  free(lse);
  return stats.delivered_budget;
}

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: embed_c INDEX.sqz\n");
    return 2;
  }
  sqz_index* index;
  check(sqz_index_open(argv[1], SQZ_OPEN_MMAP, &index));
  sqz_index_info info = {.struct_size = sizeof info};
  check(sqz_index_describe(index, &info));
  printf("%s: %lld tokens, %lld layers, %lld query heads, %lld KV heads, d = %lld\n", argv[1],
         (long long)info.tokens, (long long)info.layers, (long long)info.query_heads,
         (long long)info.kv_heads, (long long)info.head_dim);

  const size_t count = (size_t)(info.query_heads * info.head_dim);
  float* q = malloc(3 * count * sizeof *q);
  float *dense = q + count, *sparse = q + 2 * count;
  for (size_t i = 0; i < count; ++i) q[i] = sinf((float)(i * i % 1009));

  attend(index, SQZ_SELECTOR_DENSE, 0, q, dense, info.query_heads, info.head_dim);
  const double read =
      attend(index, SQZ_SELECTOR_SQUEEZED, 0.125, q, sparse, info.query_heads, info.head_dim);
  double error = 0, norm = 0;
  for (size_t i = 0; i < count; ++i) {
    error += (dense[i] - sparse[i]) * (dense[i] - sparse[i]);
    norm += dense[i] * dense[i];
  }
  printf("read %.1f %% of the bytes, relative error %.4f\n", 100 * read, sqrt(error / norm));
  free(q);
  sqz_index_close(index);
  return 0;
}
