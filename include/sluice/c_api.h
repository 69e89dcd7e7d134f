/* Sluice from C, and from anything that calls C: create a layer from a checkpoint or from raw pointers, ask for its
 * workspace, run it. No exceptions cross this boundary and there is no global state: errors are kept in a context.
 *
 * Letters: T tokens, S slots per token, E experts, L local experts, H hidden, I intermediate, R rows,
 * Hb/Ib = ceil(H/128), ceil(I/128). All sizes and strides count elements and are 64-bit.
 *
 * Threads: a layer is immutable and may be used from several threads at once, each with its own context and workspace.
 * Versions: every struct begins with struct_bytes; set it with SLUICE_INIT and later fields stay zero for old callers.
 */
#ifndef SLUICE_C_API_H_
#define SLUICE_C_API_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum sluice_status {
  SLUICE_OK = 0,
  SLUICE_INVALID_ARGUMENT = 1,
  SLUICE_UNSUPPORTED = 2,
  SLUICE_NOT_FOUND = 3,
  SLUICE_BAD_DATA = 4,
  SLUICE_IO_ERROR = 5,
  SLUICE_WORKSPACE_TOO_SMALL = 6,
  SLUICE_INTERNAL = 7,
  SLUICE_OUT_OF_MEMORY = 8, /* of a GPU */
  SLUICE_PEER_FAILURE = 9   /* another rank is dead, late, or was made for another layer */
} sluice_status;

/* The numbers are those of sluice::DType. */
typedef enum sluice_dtype {
  SLUICE_F32 = 0,
  SLUICE_BF16 = 1,
  SLUICE_E4M3 = 4, /* OCP e4m3fn */
  SLUICE_I32 = 11,
  SLUICE_I64 = 13
} sluice_dtype;

typedef enum sluice_precision {
  SLUICE_W8A8 = 0,
  SLUICE_W8A16 = 1,
  SLUICE_PRECISION_BF16 = 2,
  SLUICE_PRECISION_F32 = 3
} sluice_precision;

typedef enum sluice_device_kind { SLUICE_CPU = 0, SLUICE_CUDA = 1 } sluice_device_kind;

typedef struct sluice_context sluice_context; /* keeps the last error, and the stream of its calls */
typedef struct sluice_layer sluice_layer;

/* A borrowed tensor. rank 0: absent. All strides 0: dense row-major. Inputs are never written. */
typedef struct sluice_tensor {
  void* data;
  int32_t dtype; /* sluice_dtype */
  int32_t rank;  /* 0..3 */
  int64_t shape[3];
  int64_t stride[3];
} sluice_tensor;

typedef struct sluice_options {
  size_t struct_bytes;
  int32_t precision;           /* sluice_precision */
  int32_t num_threads;         /* 0: one per usable core */
  int64_t max_tokens;          /* T of the largest forward */
  int64_t max_rows;            /* R of the largest forward_grouped; 0: max_tokens * S */
  int64_t max_rows_per_expert; /* Mmax of the largest forward_masked; 0: not used */
  int32_t routed_only;         /* leave the shared expert out */
  int32_t checked;             /* invalid expert ids are errors instead of counted; SLUICE_CPU only */
  int32_t device_kind;         /* sluice_device_kind: where the layer, its tensors and its workspace are */
  int32_t device_index;        /* of a GPU */
  int32_t upload;              /* sluice_layer_create on a GPU: the weights are host memory, and are copied to it */
  const char* force;           /* "NAME,STAGE:NAME": implementations that must be taken; null: none */
  const char* disable;  /* implementations never taken, as in the environment variable SLUICE_DISABLE; null: none */
  int64_t first_expert; /* create_from_checkpoint: experts [first_expert, first_expert + num_local) of the layer */
  int64_t num_local;    /* 0: all from first_expert on; -1: none */
} sluice_options;

/* sluice/config.h explains each field; the enums count in the order given there. */
typedef struct sluice_moe_config {
  size_t struct_bytes;
  int64_t hidden, intermediate, num_experts, top_k;
  int64_t first_expert, num_local; /* num_local 0: all, -1: none */
  int64_t shared_intermediate;     /* 0: no shared expert */
  int32_t has_shared_gate;
  int32_t weight_on_input;
  int32_t score;       /* 0 softmax, 1 sigmoid, 2 sqrt-softplus, 3 the logit itself */
  int32_t group_score; /* 0 none, 1 max, 2 sum of the two largest */
  int32_t weight_rule; /* 0 the score, 1 softmax of the chosen logits, 2 sigmoid of the logit */
  int32_t renorm;      /* 0 none, 1 w/(sum+1e-20), 2 w/max(sum,1e-12) */
  int32_t scale_rule;  /* 0 always, 1 only where nothing was renormalised */
  int32_t has_score_bias;
  int32_t has_router_bias;
  int64_t n_group, topk_group; /* 0 reads as 1 */
  float routed_scaling_factor; /* 0 reads as 1 */
  int32_t activation;          /* 0 silu, 1 silu clamped, 2 gpt-oss */
  float activation_limit, activation_alpha;
  int32_t activation_scale; /* 0 f32, 1 ue8m0 */
} sluice_moe_config;

/* sluice/weights.h gives shapes and dtypes. The memory stays the caller's and must outlive the layer. */
typedef struct sluice_ffn_weights {
  sluice_tensor w13, w13_scale, w13_bias, w2, w2_scale, w2_bias;
} sluice_ffn_weights;

typedef struct sluice_layer_weights {
  size_t struct_bytes;
  sluice_tensor w_gate, router_bias, score_bias, shared_gate;
  sluice_ffn_weights experts, shared;
} sluice_layer_weights;

/* Zeroes a struct and sets its struct_bytes: SLUICE_INIT(options); */
#define SLUICE_INIT(object)                                        \
  do {                                                             \
    unsigned char* sluice_bytes_ = (unsigned char*)&(object);      \
    size_t sluice_i_;                                              \
    for (sluice_i_ = 0; sluice_i_ < sizeof(object); ++sluice_i_) { \
      sluice_bytes_[sluice_i_] = 0;                                \
    }                                                              \
    (object).struct_bytes = sizeof(object);                        \
  } while (0)

const char* sluice_version(void);
const char* sluice_status_name(sluice_status status);

sluice_status sluice_context_create(sluice_context** context);
void sluice_context_destroy(sluice_context* context);
/* The sentence of the last call on this context that failed; "" if none did. Valid until the next call on it. */
const char* sluice_last_error(const sluice_context* context);

/* On a GPU: the cudaStream_t that calls with this context queue their work on; null (as created): the default stream. */
void sluice_context_set_stream(sluice_context* context, void* stream);

/* Loads MoE layer `layer` of a Hugging Face checkpoint folder; to a GPU it is uploaded. */
sluice_status sluice_layer_create_from_checkpoint(sluice_context* context, const char* path, int64_t layer,
                                                  const sluice_options* options, sluice_layer** out);
/* Takes weights in place, or uploads them (options.upload); uploaded ones are freed with the layer. */
sluice_status sluice_layer_create(sluice_context* context, const sluice_moe_config* config,
                                  const sluice_layer_weights* weights, const sluice_options* options,
                                  sluice_layer** out);
void sluice_layer_destroy(sluice_layer* layer);

/* What the layer resolved to, as text: a line for each stage (implementation, configuration), for each that was declined
 * and why, and for each item of the workspace. Writes at most `bytes` bytes, terminator included, and returns the bytes
 * all of it needs; text may be null with bytes 0. */
size_t sluice_layer_describe(const sluice_layer* layer, char* text, size_t bytes);
/* GPUs that can be used; 0 leaves the reason in the context's last error. */
int32_t sluice_num_gpus(sluice_context* context);

int64_t sluice_layer_workspace_bytes(const sluice_layer* layer);
/* hidden, intermediate, num_experts, top_k of the layer; any pointer may be null. */
void sluice_layer_sizes(const sluice_layer* layer, int64_t* hidden, int64_t* intermediate, int64_t* num_experts,
                        int64_t* top_k);

/* 1. x [T,H] bf16 or f32 -> out [T,H] bf16 or f32. topk_idx [T,S] i32, topk_weight [T,S] f32 (both written) and
 * counters [2] i64 (added to: tokens with too few finite experts, invalid ids) may be null. workspace: any alignment.
 */
sluice_status sluice_layer_forward(sluice_context* context, const sluice_layer* layer, const sluice_tensor* x,
                                   const sluice_tensor* out, const sluice_tensor* topk_idx,
                                   const sluice_tensor* topk_weight, const sluice_tensor* counters, void* workspace,
                                   size_t workspace_bytes);
/* 2. Routing given: ids global, -1 skipped. x_scale [Hb,T] f32 only with e4m3 x, else null. */
sluice_status sluice_layer_forward_routed(sluice_context* context, const sluice_layer* layer, const sluice_tensor* x,
                                          const sluice_tensor* x_scale, const sluice_tensor* topk_idx,
                                          const sluice_tensor* topk_weight, const sluice_tensor* counters,
                                          const sluice_tensor* out, void* workspace, size_t workspace_bytes);
/* 3. Rows grouped by expert: rows [R,H] (+ scale [Hb,R]), expert_offset [L+1] i32 -> out [R,H], f32 at precision f32, else bf16. */
sluice_status sluice_layer_forward_grouped(sluice_context* context, const sluice_layer* layer,
                                           const sluice_tensor* rows, const sluice_tensor* rows_scale,
                                           const sluice_tensor* expert_offset, const sluice_tensor* out,
                                           void* workspace, size_t workspace_bytes);
/* 4. Padded rows: [L*Mmax,H] (+ scale [Hb,L*Mmax]) with counts num_rows [L] i32 -> out [L*Mmax,H]. */
sluice_status sluice_layer_forward_masked(sluice_context* context, const sluice_layer* layer, const sluice_tensor* rows,
                                          const sluice_tensor* rows_scale, const sluice_tensor* num_rows,
                                          const sluice_tensor* out, void* workspace, size_t workspace_bytes);

#ifdef __cplusplus
}
#endif
#endif /* SLUICE_C_API_H_ */
