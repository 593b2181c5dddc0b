/* sqz_build.h - build an index (.sqz) from the keys and values of a fixed context.
 *
 * The contract is that of sqz.h: ownership, errors, threads, null. The library runs no model. The
 * host runs it once over the context and hands over each layer as it comes:
 *
 *   sqz_build_create -> sqz_build_add_layer (layer 0, 1, ..., layers - 1) -> sqz_build_finish
 *
 * Layers that have no keys (state, shared, none) are left out; sqz_build_add_state() takes state.
 *
 * The file appears under its name in sqz_build_finish(), whole. A build that fails, is destroyed or
 * dies with its process leaves nothing under the name. The same input gives the same bytes for any
 * number of threads, and the bytes of `sqz-index build --capture` with the same options.
 *
 * Options and results are JSON objects in UTF-8. Null options mean {}: all have defaults. An option
 * that is unknown or out of range is SQZ_INVALID_ARGUMENT, and the message names it. A function
 * that has a result leaves it in sqz_last_result().
 *
 * Memory. A build on the CPU holds one layer in float32, two layers as they are stored, and the
 * queries of all layers. A function without room for its work returns SQZ_OUT_OF_MEMORY.
 *
 * Threads. A build serves one call at a time. In a child of the process that created it, it may
 * only be left alone.
 */
#ifndef SQZ_SQZ_BUILD_H_
#define SQZ_SQZ_BUILD_H_

#include "sqz/sqz.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The result of the last function of this header that had one, on this thread: "{...}", or "" if
 * there was none. Valid until the next call of such a function on this thread. */
SQZ_API const char* sqz_last_result(void);

/* Gets told how far a call is: `done` grows from 0 to 1. The calls come one at a time, maybe from
 * other threads than the caller's. `update` must not call this library, and cannot stop it. */
typedef struct sqz_progress {
  void (*update)(void* user, double done);
  void* user;
} sqz_progress; /* a null pointer where one is taken: nobody is told */

/* ---- Build ---------------------------------------------------------------------------------- */

typedef struct sqz_build sqz_build;

/* Plans a build, and makes a file that has no name yet.
 *
 * path: of the index.
 * model: JSON, every field of an index's `model` (docs/format.md): architecture, layers,
 *   query_heads (Hq), kv_heads (Hkv), head_dim (d), attention_scale, sliding_window, rope, geometry
 * tokens: [count] ids of the fixed context, with special tokens; count is N.
 *
 * options, as those of `sqz-index build`:
 *   sink 16, tail 100           first and last tokens, always attended exactly; tail >= 1
 *   partition "kmeans"          or "pages", of page_size (16) tokens
 *   levels 2                    of the tree of clusters, or level_fractions: clusters a token,
 *                               coarse to fine, [0.01, 0.05]
 *   coarse_keep 0.5             fraction of the keys that the coarse levels let through
 *   iterations 10               of k-means
 *   rows "bf16"                 or "f16", "q8": how keys and values are stored
 *   layers16 []                 layers whose rows stay in 16 bits
 *   seed 0, threads 0           0 threads = all cores
 *   engine "auto", gpu 0        of k-means: "cuda" on that device where it can run, else "faiss",
 *                               which stands for the CPU
 *   tokenizer_hash ""           XXH3-64 of tokenizer.json, hexadecimal, if a tokenizer made the ids
 *   chat null                   an object, the texts around the turns of the chat that the context
 *                               stands in (docs/format.md); kept in the index
 *   after (none)                context_id of each context that stood in front when the keys were
 *                               made, in their order: the index serves behind these alone
 *   state []                    for each layer null or {name: [dtype, [shape]]}, dtype as "F32" or
 *                               "BF16": the tensors that sqz_build_add_state() will bring
 *   replace false               an existing file
 *   dry_run false               make no file: only the result is wanted
 *
 * Result: bytes (of the file), tail, peak_memory (bytes, of this library), gpu_memory, clusters (a
 * KV head, coarse to fine), pages, takes_gpu (whether keys and values may be in the memory of
 * `gpu`).
 *
 * SQZ_EXISTS if the file exists and is not to be replaced; SQZ_IO if there is no room for it;
 * SQZ_INVALID_ARGUMENT for ids that the vocabulary does not have, and for a context of fewer than
 * sink + tail + 2 tokens. */
SQZ_API sqz_status sqz_build_create(const char* path, const char* model, const int32_t* tokens,
                                    int64_t count, const char* options, sqz_build** build);

/* Takes the next layer. All tensors are contiguous, f32, f16 or bf16, and borrowed for the call.
 *
 * keys: [Hkv, N, d] after RoPE, values: [Hkv, N, dv], with the heads and dimensions of the layer,
 * in host memory; or, if the build takes that, both in one dtype in the memory of its GPU, where
 * all work on them has ended. Of a recent layer (sliding or chunked) N may be the last tokens
 * alone, those that a query behind the context sees. queries: [Hq, tail, d] in host memory, after
 * RoPE: those of the last tokens of the context, which calibrate. Null is fine for recent layers,
 * and for pages.
 *
 * SQZ_NUMERIC names layer, KV head and token of a number that is NaN, infinite or beyond the stored
 * type. After an error only sqz_build_destroy() is left. */
SQZ_API sqz_status sqz_build_add_layer(sqz_build* build, const sqz_tensor* keys,
                                       const sqz_tensor* values, const sqz_tensor* queries,
                                       const sqz_progress* progress);

/* Takes a tensor of the engine's own cache of a layer behind the context's last token: contiguous,
 * of any dtype, in host memory. `name` and its shape as in the option `state`. The bytes are kept
 * as they are. In any order, each once. */
SQZ_API sqz_status sqz_build_add_state(sqz_build* build, int64_t layer, const char* name,
                                       const sqz_tensor* tensor);

/* Calibrates, and publishes the file. To be called once, after the last layer.
 * Result: path, tokens, clustered, clusters, pages, bytes, build_id, engine, fingerprint (of the
 * model), seconds {cluster, calibrate, write}. */
SQZ_API sqz_status sqz_build_finish(sqz_build* build);

/* Frees a build. Before sqz_build_finish() it gives up what was built. */
SQZ_API void sqz_build_destroy(sqz_build* build);

/* ---- A finished index ----------------------------------------------------------------------- */

/* Result: what `sqz-index info --json` prints. */
SQZ_API sqz_status sqz_index_info_json(const sqz_index* index);

/* Publishes the index at `output` with a calibration by queries that were asked of it: as it is
 * asked later, so that it delivers the budget that it is asked for.
 *
 * calls: [count] query tokens of each call, a prompt or one token of an answer; n is their sum.
 * queries: [layers of the model] pointers to tensors [n, Hq, d] in host memory, f32, f16 or bf16,
 * after RoPE; null for layers that are stored dense, which need none.
 * output: may be the file of the index itself, with replace: the old file or the new one is there,
 * never a part.
 * options: source "recorded queries" (for people; kept in the file), replace false, threads 0.
 * Result: path, bytes, queries (n), source.
 *
 * SQZ_UNSUPPORTED if the index has nothing to calibrate; SQZ_CORRUPT if it is damaged. */
SQZ_API sqz_status sqz_index_calibrate(const sqz_index* index, const int64_t* calls, int64_t count,
                                       const sqz_tensor* const* queries, const char* output,
                                       const char* options, const sqz_progress* progress);

/* Publishes the index at `output` with rows in fewer bits: the bytes of a build with these options.
 * options: rows "q8", layers16 [], replace false, threads 0.
 * Result: path, bytes, bytes_before, rows. */
SQZ_API sqz_status sqz_index_compress(const sqz_index* index, const char* output,
                                      const char* options, const sqz_progress* progress);

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* SQZ_SQZ_BUILD_H_ */
