/* sqz.h - serve attention over a fixed context from an index (.sqz) built offline.
 *
 * The contract
 *
 * What it does. sqz_attend() computes the attention of queries over the fixed context, reading only
 * the key clusters that matter to them, and returns (out, lse) per query and head. Merge it with
 * your own causal attention over what follows the fixed context (sqz_merge_states): softmax
 * attention over disjoint sets of keys merges exactly. Nothing else of an engine changes.
 *
 * Ownership. Handles are opaque; whoever creates one destroys it. Strings and structs that are
 * returned by pointer belong to the handle and live as long as it does. An index is reference
 * counted by its sessions: it may be closed before them.
 *
 * Errors. Every function that can fail returns a sqz_status. sqz_last_error() gives the sentence
 * that belongs to the last failure on the calling thread. Nothing is thrown, nothing is printed,
 * nothing aborts, no signal handler is installed. After an error, outputs are unspecified and
 * handles valid.
 *
 * Contexts. A session serves any number of indexes of one model: each has a slot. A call names for
 * each of its requests the slots that it attends to, none, one or several documents one behind the
 * other.
 *
 * Threads. An index may be used from any number of threads. A session serves one call at a time:
 * other calls with it wait, those that fill and empty slots, too. Use one session per thread (they
 * share the index).
 *
 * Fork. A child process may use an index that was opened before fork(), as long as no other thread
 * was inside this library then: it shares the mapped pages with its parent. Sessions and uploads
 * belong to the process that made them. In a child they are refused with SQZ_UNSUPPORTED, and
 * destroying them there frees nothing; make new ones. CUDA itself does not work in a child of a
 * process that has used it.
 *
 * Memory. Everything is allocated when a session is created. A sqz_attend() that succeeds allocates
 * nothing.
 *
 * Versions. Structs that you fill start with struct_size = sizeof(the struct), so that another
 * version of the library knows which fields you have. Versions with the same first two numbers only
 * add fields at the end; zero is always a valid default. A field that this library does not know
 * must be zero.
 *
 * Tensor parallelism. Upload and session take a range of KV heads. A rank then holds and serves its
 * own heads and the query heads that belong to them. Hkv and Hq below are the numbers of heads in
 * the range. Each head reads the same keys as in a session of all heads.
 *
 * Null. A null pointer where a pointer is required is SQZ_INVALID_ARGUMENT, never a crash. Closing
 * or destroying null does nothing.
 *
 * CUDA. After sqz_index_upload(), a session with device_type 2 serves from that GPU. Its tensors
 * are in the GPU's memory, and sqz_attend() only puts work on the caller's stream: it neither waits
 * nor allocates and can be captured in a CUDA graph. It cannot report a logit that is NaN or
 * infinite, so the rows of the result are NaN instead. Rows of prompts and batches, and on a GPU
 * before 9.0 rows of tokens that select, may also be NaN if their largest logit is beyond 9e7 in
 * size, and on Hopper if their query is beyond 1e17.
 *
 * A graph keeps the addresses of its session's memory: do not replay it once the session is
 * destroyed. One thread may create, use and destroy sessions and uploads while another captures a
 * graph, in any capture mode. Destroying waits for the work that is under way on the GPU.
 *
 * Results. The same call gives the same bits for any number of threads, whatever was called before
 * it; another processor may differ by float32 rounding. lse is the natural logarithm of the sum of
 * exponentials, everywhere.
 */
#ifndef SQZ_SQZ_H_
#define SQZ_SQZ_H_

#include <stddef.h>
#include <stdint.h>

#if defined(SQZ_STATIC)
#define SQZ_API
#elif defined(__GNUC__)
#define SQZ_API __attribute__((visibility("default")))
#else
#define SQZ_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum sqz_status {
  SQZ_OK = 0,
  SQZ_INVALID_ARGUMENT = 1, /* an argument is null, out of range or inconsistent */
  SQZ_NOT_FOUND = 2,        /* no such file */
  SQZ_IO = 3,               /* the operating system refused; the message has the call */
  SQZ_CORRUPT = 4,          /* the file breaks its format */
  SQZ_UNSUPPORTED = 5,      /* well-formed, but this build or machine does not do it */
  SQZ_MISMATCH = 6,         /* index and model, tokenizer or tokens do not belong together */
  SQZ_OUT_OF_MEMORY = 7,
  SQZ_NUMERIC = 8,    /* a logit or a sum of values is NaN or beyond float32 */
  SQZ_EXISTS = 9,     /* an output is there and must not be replaced: sqz_build.h alone */
  SQZ_CANCELLED = 10, /* not returned by this library */
  SQZ_INTERNAL = 11   /* a bug in sqz: please report it */
} sqz_status;

/* "ok", "invalid argument", ...: never null, static. */
SQZ_API const char* sqz_status_string(sqz_status status);
/* The sentence of the last failure on this thread; "" if there was none. Valid until the next
 * failure on this thread. */
SQZ_API const char* sqz_last_error(void);
/* "0.2.0", static. */
SQZ_API const char* sqz_version(void);

/* ---- Tensors -------------------------------------------------------------------------------- */

/* A borrowed view of memory, laid out like DLPack's DLTensor, so that a pointer to one may be cast
 * to the other. It is contiguous in row-major order; strides are null or agree with that. Only
 * `lse` may have other strides, for example those of a [heads, tokens] array seen as [tokens,
 * heads]. On CUDA, queries and outputs begin at multiples of 16 bytes. */
typedef struct sqz_tensor {
  void* data;
  int32_t device_type; /* 1 = CPU, 2 = CUDA, as in DLPack */
  int32_t device_id;
  int32_t ndim;
  uint8_t dtype_code;   /* 0 int, 1 uint, 2 float, 4 bfloat, as in DLPack */
  uint8_t dtype_bits;   /* 16 or 32 for floats */
  uint16_t dtype_lanes; /* 1 */
  int64_t* shape;
  int64_t* strides; /* in elements; null = contiguous */
  uint64_t byte_offset;
} sqz_tensor;

/* ---- Index ---------------------------------------------------------------------------------- */

typedef struct sqz_index sqz_index;

typedef enum sqz_open_mode {
  SQZ_OPEN_MMAP = 0,  /* map the file: opening costs nothing that grows with it. If the file is cut
                         or the disk fails later, the host gets SIGBUS */
  SQZ_OPEN_READ = 1,  /* read it all into memory, for hosts that must not get SIGBUS */
  SQZ_OPEN_VERIFY = 2 /* read it and check the bytes that were read, as sqz_index_verify() does:
                         SQZ_CORRUPT unless every checksum is right */
} sqz_open_mode;

/* Opens the file and checks its header. Any sequence of bytes gives a handle or an error. */
SQZ_API sqz_status sqz_index_open(const char* path, sqz_open_mode mode, sqz_index** index);
SQZ_API void sqz_index_close(sqz_index* index);

typedef enum sqz_partition {
  SQZ_PARTITION_KMEANS = 0, /* clusters of similar keys, under a tree of centroids */
  SQZ_PARTITION_PAGES = 1,  /* pages of consecutive tokens, with the range of their keys */
  SQZ_PARTITION_PRUNED = 2, /* only the keys that one selector reads at one budget: it serves that
                               selector alone, with budget, keep and layers as they are */
  SQZ_PARTITION_BUCKETS = 3 /* buckets of a classifier, which is in the index */
} sqz_partition;

typedef struct sqz_index_info {
  uint32_t struct_size; /* in: sizeof(sqz_index_info) */
  int32_t format_version;
  int64_t tokens;     /* N, length of the fixed context: the next token's position is N */
  int64_t sink, tail; /* first and last tokens, always attended exactly */
  int64_t layers;
  int64_t query_heads;    /* Hq; this and the next two are of full layers, see sqz_layer_info */
  int64_t kv_heads;       /* Hkv */
  int64_t head_dim;       /* d */
  int64_t levels;         /* of the centroid tree; 0 = pages, or every layer is dense */
  double attention_scale; /* logits are scale * q.k */
  uint64_t file_bytes;
  int32_t partition;             /* sqz_partition */
  int32_t dtype_code;            /* of keys, values and centroids, as in sqz_tensor: 2 or 4 */
  const char* producer;          /* "sqz 0.2.0" */
  const char* architecture;      /* "LlamaForCausalLM" */
  const char* model_fingerprint; /* hexadecimal; equal for equal models */
  const char* tokenizer_hash;    /* "" if the index was built from token ids */
  const char* tokens_hash;       /* XXH3-64 of the token ids as little-endian int32, hexadecimal */
  int64_t page_size;             /* tokens of a page; 0 = no pages */
  int32_t dtype_bits;            /* 16 */
  int32_t composes;       /* 1: it can stand behind another context, see sqz_context.offset */
  const char* context_id; /* hexadecimal; equal for equal keys: of the tokens, and `after` */
  const char* after; /* context_id of each context that stood in front when the keys were made, with
                        commas between; "" if none did. It serves behind these alone */
} sqz_index_info;

SQZ_API sqz_status sqz_index_describe(const sqz_index* index, sqz_index_info* info);

typedef enum sqz_layer_kind {
  SQZ_LAYER_FULL = 0,   /* serves every token of the context */
  SQZ_LAYER_RECENT = 1, /* sliding or chunked: it holds the last tokens, and reads them all */
  SQZ_LAYER_STATE = 2,  /* no keys: tensors of the engine's own cache, for sqz_index_state() */
  SQZ_LAYER_SHARED = 3, /* it is served, and counted in the stats, as layer `of` */
  SQZ_LAYER_NONE = 4    /* the index holds nothing of it */
} sqz_layer_kind;

typedef struct sqz_layer_info {
  uint32_t struct_size; /* in: sizeof(sqz_layer_info) */
  int32_t kind;         /* sqz_layer_kind; the next six are of full, recent and shared layers */
  int64_t query_heads, kv_heads;
  int64_t head_dim, value_dim; /* of queries and keys; of values and outputs */
  int64_t window;              /* a query sees so many tokens, its own included; 0 = no limit */
  int64_t chunk;  /* a query sees the tokens of its chunk of so many positions; 0 = no chunks */
  int64_t of;     /* the layer whose keys and values it uses; -1 = its own */
  int64_t states; /* tensors of sqz_index_state() */
  double attention_scale;
} sqz_layer_info;

/* layer: 0 .. layers - 1. */
SQZ_API sqz_status sqz_index_describe_layer(const sqz_index* index, int64_t layer,
                                            sqz_layer_info* info);

/* State tensor `number`, 0 .. states - 1, of a layer: what an engine's cache holds behind the
 * context's last token. name and the view's data and shape belong to the index; the bytes are those
 * of the mapped file, and are not to be written. */
SQZ_API sqz_status sqz_index_state(const sqz_index* index, int64_t layer, int64_t number,
                                   const char** name, sqz_tensor* view);

/* Checks every checksum and invariant; reads the whole file, on all cores. If there is a problem,
 * it returns SQZ_CORRUPT, and sqz_last_error() has the first one. */
SQZ_API sqz_status sqz_index_verify(const sqz_index* index);

/* ---- GPUs ----------------------------------------------------------------------------------- */

typedef struct sqz_upload_options {
  uint32_t struct_size; /* sizeof(sqz_upload_options) */
  int32_t device_id;    /* CUDA device */
  int32_t background;   /* 1: return once the memory is allocated. Layers are copied in order, and
                           sqz_attend() waits for a layer that is not there yet */
  int32_t threads;      /* threads that copy; 0 = 12, or as many as the machine has */
  int64_t first_kv_head, kv_heads; /* the range to upload; kv_heads 0 = all from the first on */
} sqz_upload_options;

/* Copies the index to the memory of a GPU, where sessions with device_type 2 find it. Null options
 * mean device 0 and all heads. SQZ_UNSUPPORTED if there is no GPU that can be used or the library
 * has no CUDA; SQZ_OUT_OF_MEMORY; SQZ_INVALID_ARGUMENT if the index is there already. After an
 * error nothing is allocated. */
SQZ_API sqz_status sqz_index_upload(sqz_index* index, const sqz_upload_options* options);

/* Frees that memory once the sessions that use it are destroyed. */
SQZ_API sqz_status sqz_index_unload(sqz_index* index, int32_t device_id);

/* ---- Sessions ------------------------------------------------------------------------------- */

typedef struct sqz_session sqz_session;

typedef enum sqz_selector {
  SQZ_SELECTOR_AUTO = 0,     /* the one that the index was built for: squeezed for clusters, quest
                                for pages, saap for buckets, a pruned index's own */
  SQZ_SELECTOR_SQUEEZED = 1, /* clusters scored by equations 1 to 3 of Squeezed Attention */
  SQZ_SELECTOR_DENSE = 2,    /* every key: the reference */
  SQZ_SELECTOR_QUEST = 3,    /* the pages with the greatest upper bound of q.k, as many as the
                                budget pays; needs an index of pages */
  SQZ_SELECTOR_STREAM = 4,   /* sinks and most recent keys, for every query */
  SQZ_SELECTOR_WINDOW = 5,   /* the most recent keys without the sinks, for every query */
  SQZ_SELECTOR_H2O = 6,      /* half the most recent keys, half the keys that the context's own
                                tokens attended to most; needs an index built with
                                --heavy-hitters */
  SQZ_SELECTOR_SAAP = 7      /* the buckets that a trained classifier names from the queries before
                                RoPE, best first until the keys asked for are read; needs an index
                                of buckets, and q_before_rope or positions in sqz_attend_args. The
                                bytes of the classifier do not count */
} sqz_selector;

/* "auto", "squeezed", ...: a static string; null if this library has no such selector. The numbers
 * have no gaps. */
SQZ_API const char* sqz_selector_name(sqz_selector selector);

typedef enum sqz_rule {
  SQZ_RULE_BUDGET = 0,   /* each layer and KV head gets its calibrated share of the keys, best
                            first: the asked number of keys, to half a cluster a head */
  SQZ_RULE_THRESHOLD = 1 /* score >= T, one T for all layers and heads, as in the paper; implied by
                            thresholds */
} sqz_rule;              /* for squeezed; the other selectors always hold the budget */

typedef struct sqz_session_options {
  uint32_t struct_size; /* sizeof(sqz_session_options) */
  int32_t device_type;  /* 0 or 1 = CPU, 2 = CUDA: the index must have been uploaded */
  int32_t device_id;
  int32_t selector; /* sqz_selector */
  int32_t rule;     /* sqz_rule */
  int32_t levels;   /* levels of the tree to use, from the finest on: 0 = all, 1 = clusters alone */
  int32_t uniform_layers; /* 1: all layers keep the same share, whatever the index embeds */
  /* How much to read: exactly one of the next three, unless dense. All in (0, 1]; 0 = not given. */
  double budget; /* bytes to read, as a fraction of a sparse layer's keys and values. They include
                    sinks, recent window, centroids or page bounds, and value means */
  double keep;   /* clustered keys to read, as a fraction of all: 1 - sparsity */
  const double* thresholds; /* [levels used], coarse to fine: T itself, as in the paper */
  int64_t block;            /* query tokens of a request that share one selection; 0 = all of a
                               call's */
  int64_t max_tokens;       /* most query tokens in one call; 0 = 4096 */
  int32_t threads;          /* CPU threads; 0 = all cores */
  int32_t dense_layers; /* how many of the model's first layers are read whole: 0 = the selector's
                           default (quest 2, others none), -1 = none. Their bytes are not part
                           of the budget, but count in the stats */
  int64_t max_request_tokens; /* most query tokens of one request; 0 = max_tokens. 1 saves hundreds
                                 of MB on CUDA */
  const double* layer_scales; /* [layers of the model] each layer's keep as a multiple of the
                                 average, for every selector. Only the ratios matter; the total is
                                 that of the budget. Above 0; infinity = read the layer whole. A
                                 layer keeps at most all of its keys, and the others get the rest.
                                 null = as the index embeds, else all alike. Not with
                                 SQZ_RULE_THRESHOLD, whose thresholds are the same for all layers:
                                 it ignores what the index embeds */
  int64_t layer_scale_count;  /* entries of layer_scales; 0 without them */
  int64_t first_kv_head, kv_heads; /* the range to serve; kv_heads 0 = all from the first on. On
                                      CUDA both 0, or the range that was uploaded */
  int32_t max_contexts; /* most contexts of one request, 1 to SQZ_MOST_CONTEXTS; 0 = 1. Above 1, a
                           session has memory for a second copy of queries and outputs */
  int64_t device_requests; /* CUDA: most requests of a call with device_contexts; 0 = no such calls.
                              GPUs from compute capability 9.0, selectors squeezed and dense. All
                              indexes then have the same rows (16 or 8 bits) and element type */
  int64_t device_tokens;   /* most tokens of a context in such a call; 0 = those of the first index.
                              A larger one is refused by sqz_session_put() (SQZ_UNSUPPORTED) */
} sqz_session_options;

#define SQZ_MOST_CONTEXTS 8
#define SQZ_MOST_SLOTS 65536

/* Checks the index's offsets (SQZ_CORRUPT), resolves thresholds for the asked budget, allocates
 * everything and starts the threads. If the budget cannot even pay for centroids, sinks and recent
 * window, it returns SQZ_INVALID_ARGUMENT, and the message has the least budget that can be met.
 * Two cases are served densely instead, see dense_fallback in sqz_stats: reading everything costs
 * no more than selecting, or a context of less than 4096 tokens cannot meet the budget. */
SQZ_API sqz_status sqz_session_create(sqz_index* index, const sqz_session_options* options,
                                      sqz_session** session);
SQZ_API void sqz_session_destroy(sqz_session* session);

/* Puts an index into a slot, 0 to SQZ_MOST_SLOTS - 1, in place of the one that is there. Null
 * empties the slot. sqz_session_create() fills slot 0. The session's options hold for all its
 * indexes; each has its own thresholds and its own stats, which begin at 0. SQZ_MISMATCH: an index
 * of another model; else the errors of sqz_session_create(), after which the slot is as before. On
 * CUDA the index must have been uploaded, and the work under way that reads the old one is waited
 * for. */
SQZ_API sqz_status sqz_session_put(sqz_session* session, int64_t slot, sqz_index* index);

/* A context as a request sees it. Documents whose keys were made apart can stand one behind the
 * other, because RoPE depends on differences of positions alone: the session turns the queries back
 * by `offset` for this context, whose keys stay as they are. Questions that need several documents
 * at once lose more than others, since no document's keys have seen another. */
typedef struct sqz_context {
  int32_t slot;   /* an empty one is SQZ_INVALID_ARGUMENT; -1 = no context */
  int32_t skip;   /* first tokens that are left out, at most the index's `sink`: 4 for all but the
                     first document of a request, whose sinks serve all */
  int64_t offset; /* position of the context's first token; below 0 if the queries' positions begin
                     with 0 behind it. Unless it is 0, max_contexts must be above 1, the index must
                     say how the model turns its keys, and the model must not have sliding windows
                     (SQZ_UNSUPPORTED) */
} sqz_context;

typedef struct sqz_attend_args {
  uint32_t struct_size; /* sizeof(sqz_attend_args) */
  int64_t layer;       /* 0 .. layers - 1, one that has keys; Hq, d and dv are those of the layer */
  const sqz_tensor* q; /* [T, Hq, d] f32, f16 or bf16, after RoPE at positions >= N */
  sqz_tensor* out;     /* [T, Hq, dv] dtype of q */
  sqz_tensor* lse;     /* [T, Hq] f32, any strides above 0; of scale * q.k over the keys that were
                          read. Without such keys it is -infinity, and out is 0 */
  const int64_t* positions; /* [T] token positions of the queries, each >= N, or >= offset + N.
                               Recent layers need them; else null is fine. Host memory, as indptr */
  const int64_t* indptr; /* [requests + 1] first token of each request in q: 0, ..., T; null = one
                            request. Tokens of different requests never share a selection */
  int64_t requests;
  void* stream; /* cudaStream_t on CUDA (null = the default stream); null on the CPU */
  const sqz_tensor* q_before_rope; /* [T, Hq, d] dtype of q: the same queries before RoPE, for
                                      selector saap; null = undo RoPE at `positions` */
  const sqz_context* contexts; /* [requests, contexts_each] of each request, in host memory; null =
                                  each attends to slot 0. Without a context lse = -infinity and
                                  out = 0. Neighbours with equal contexts are served together */
  int64_t contexts_each;       /* 1 to max_contexts; 0 = 1 */
  const int64_t* device_positions;    /* CUDA: [T] as positions, for recent layers, in device memory
                                         and read on the stream: a captured call serves later ones.
                                         null = `positions`, which a captured call keeps. Never
                                         checked */
  const sqz_context* device_contexts; /* CUDA: [T, contexts_each] in device memory, in place of
                                         `contexts`: each token of q is a request, and indptr is
                                         null. Kernels read them, so that a captured graph serves
                                         whatever stands there when it is replayed, and the indexes
                                         that are in those slots by then. Rows of an empty slot, of
                                         too many skipped tokens, or of an offset that the session
                                         or the model does not allow are NaN. An index that was made
                                         after others is not checked for them */
} sqz_attend_args;

/* Computes the state (out, lse) of each query over the fixed context. q, out and lse must not share
 * memory. If a query of a request is NaN or infinite, rows of that request are NaN, out and lse: on
 * the CPU all of them, on CUDA those that read or select with that query. Other requests are
 * served. If queries are finite, but a logit or a sum of values is beyond float32, it returns
 * SQZ_NUMERIC, and the message names token and head. Outputs beyond f16 or bf16 are its largest
 * number. */
SQZ_API sqz_status sqz_attend(sqz_session* session, const sqz_attend_args* args);

/* Merges two states of the same queries over disjoint keys, in place into a:
 * out = (e^(lse_a) out_a + e^(lse_b) out_b) / (e^(lse_a) + e^(lse_b)), lse = log of the
 * denominator. out: [T, Hq, dv] f32, f16 or bf16, same dtype; lse: [T, Hq] f32, any strides above
 * 0, in other memory than both outs. A row whose lse is NaN or +infinity becomes NaN. */
SQZ_API sqz_status sqz_merge_states(sqz_tensor* out_a, sqz_tensor* lse_a, const sqz_tensor* out_b,
                                    const sqz_tensor* lse_b);
/* The same on a stream, a cudaStream_t, with all four tensors on one CUDA device (sqz_merge_states
 * takes the default stream). It returns at once. */
SQZ_API sqz_status sqz_merge_states_on(sqz_tensor* out_a, sqz_tensor* lse_a,
                                       const sqz_tensor* out_b, const sqz_tensor* lse_b,
                                       void* stream);
/* The same for a model with attention sinks: sinks [Hq] f32 are logits of a key without a value
 * that each head attends to as well. After the merge out *= sigmoid(lse - sink) and lse = log(e^lse
 * + e^sink). To be given once a layer, with its last merge; null = none. */
SQZ_API sqz_status sqz_merge_states_with(sqz_tensor* out_a, sqz_tensor* lse_a,
                                         const sqz_tensor* out_b, const sqz_tensor* lse_b,
                                         const sqz_tensor* sinks, void* stream);

/* One contiguous run of slots, in cluster order, of one KV head. */
typedef struct sqz_run {
  uint32_t first;  /* slot */
  uint32_t length; /* slots */
} sqz_run;

/* Gives the runs that sqz_attend() would read of the first context for the first block of `args`,
 * without touching out and lse: for KV head h, runs[indptr[h]] .. runs[indptr[h + 1] - 1],
 * ascending, neighbours merged. `capacity` is the room in `runs`. If it is too small, it returns
 * SQZ_INVALID_ARGUMENT, and *count is the need. indptr: [Hkv + 1]. For tests, and for engines that
 * have their own kernel. */
SQZ_API sqz_status sqz_select(sqz_session* session, const sqz_attend_args* args, sqz_run* runs,
                              int64_t capacity, int64_t* indptr, int64_t* count);

typedef struct sqz_stats {
  uint32_t struct_size;    /* in: sizeof(sqz_stats) */
  int32_t dense_fallback;  /* 1: selection was asked for, but everything is read, because that costs
                              no more or because the context is too short for the budget */
  double asked_budget;     /* as given, or resolved from keep; 1 if dense; 0 with thresholds */
  double delivered_budget; /* bytes_read / bytes_dense, over all calls since the last reset */
  double asked_keep;       /* fraction of the clustered keys; 1 if dense; 0 with thresholds */
  double delivered_keep;   /* keys_read / keys_possible among clustered keys */
  uint64_t selections;     /* (layer, block) pairs served */
  uint64_t keys_read;      /* clustered keys, summed over KV heads and selections */
  uint64_t keys_possible;
  uint64_t bytes_read;  /* keys and values as they are stored, centroids, value means, sinks
                           and recent window */
  uint64_t bytes_dense; /* bytes that dense attention would have read */
  double least_budget;  /* the least budget that can be met, which pays for centroids, sinks and
                           recent  window; 1 if nothing is to be selected, 0 with thresholds */
  const char* route; /* the kernels that served the last call, a static string: "cpu", or on a GPU
                        "decode" (each request reads its own keys), "batch" (keys of several
                        requests are read once), "prefill-sm90" (prompts) or "prefill-sm80" (prompts
                        and single tokens that the others do not serve); "" before the first call */
} sqz_stats;

/* Totals of the index in a slot since it was put there or the last reset, of one layer, or of all
 * with layer = -1. A session on a GPU counts the calls whose work has ended: wait for your stream
 * first. Neither function waits for other work on the GPU. Reset: of all slots. */
SQZ_API sqz_status sqz_session_stats(const sqz_session* session, int64_t slot, int64_t layer,
                                     sqz_stats* stats);
SQZ_API sqz_status sqz_session_reset_stats(sqz_session* session);

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* SQZ_SQZ_H_ */
