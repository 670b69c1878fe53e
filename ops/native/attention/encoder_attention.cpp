// CPU kernel of ostinato::encoder_attention: every row of a packed batch attends to its whole sequence.
//
// The step's keys and values are laid out as a paged cache of blocks of 16 tokens, in memory that lasts for the call.
// Then the worker of paged attention reads them. Each sequence begins a new block, so the bits of a row depend on its
// own sequence alone (see attention.cpp).
#include "attention/attend.h"
#include "attention/cache_write.h"
#include "core/kernel.h"

namespace ostinato::attention {
namespace {

constexpr int kHeadMultiple = 8;  // the worker takes head sizes that are multiples of this

void check_encoder_tensors(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& query_start_loc) {
  for (const Tensor* x : {&q, &k, &v}) {
    OSTINATO_CHECK(x->dim == 3 && x->dtype == q.dtype && is_contiguous(*x, 2),
                   "encoder_attention: q, k and v must be [T, H, D] of one dtype with a contiguous last dimension");
    for (int i = 0; i < 3; ++i) {
      OSTINATO_CHECK(x->sizes[i] == q.sizes[i], "encoder_attention: q, k and v must have one shape");
    }
  }
  OSTINATO_CHECK(q.dtype == DType::float32 || q.dtype == DType::float16 || q.dtype == DType::bfloat16,
                 "encoder_attention: dtype must be float32, bfloat16 or float16");
  OSTINATO_CHECK(q.sizes[2] >= 1 && q.sizes[2] <= kMaxHeadDim,
                 "encoder_attention: head_dim must be from 1 to 256, got ", q.sizes[2]);
  OSTINATO_CHECK(query_start_loc.dtype == DType::int32 && query_start_loc.dim == 1 && query_start_loc.sizes[0] >= 1 &&
                     (query_start_loc.sizes[0] == 1 || query_start_loc.strides[0] == 1),
                 "encoder_attention: query_start_loc must be int32 [S+1], contiguous");
}

// Checks the starts and returns the number of tokens of the longest sequence.
int64_t longest_of(const int32_t* starts, int64_t num_seqs, int64_t num_tokens) {
  OSTINATO_CHECK(starts[0] == 0, "encoder_attention: query_start_loc must begin with 0");
  int64_t longest = 0;
  for (int64_t seq = 0; seq < num_seqs; ++seq) {
    OSTINATO_CHECK(starts[seq] <= starts[seq + 1] && starts[seq + 1] <= num_tokens,
                   "encoder_attention: query_start_loc must not fall, and must stay within ", num_tokens,
                   " tokens, sequence ", seq);
    longest = std::max<int64_t>(longest, starts[seq + 1] - starts[seq]);
  }
  return longest;
}

// `x` as the worker takes it. A head size that is not a multiple of 8 is padded with zeros, which add nothing to a
// product.
Rows rows_for_worker(Call& call, const Tensor& x, int head_dim) {
  const bool is_even = x.strides[0] % 2 == 0 && x.strides[1] % 2 == 0;  // 16-bit keys are read in pairs
  if (x.sizes[2] == head_dim && (is_even || x.dtype == DType::float32)) return rows_of(x);
  const int64_t size = element_size(x.dtype), heads = x.sizes[1];
  char* padded = call.workspace<char>(x.sizes[0] * heads * head_dim * size);
  std::memset(padded, 0, x.sizes[0] * heads * head_dim * size);
  for (int64_t token = 0; token < x.sizes[0]; ++token) {
    for (int64_t head = 0; head < heads; ++head) {
      std::memcpy(padded + (token * heads + head) * head_dim * size,
                  x.as<char>() + (token * x.strides[0] + head * x.strides[1]) * size, x.sizes[2] * size);
    }
  }
  return {padded, heads * head_dim, head_dim};
}

// The cache slots of a step's tokens. Each sequence begins a new block.
struct Places {
  int64_t num_blocks;
  int32_t* seq_lens;
  int32_t* block_table;
  int64_t* slot_mapping;
};

Places place_tokens(Call& call, const int32_t* starts, int64_t num_seqs, int64_t table_width) {
  Places places{0, call.workspace<int32_t>(num_seqs), call.workspace<int32_t>(num_seqs * table_width),
                call.workspace<int64_t>(starts[num_seqs])};
  for (int64_t seq = 0; seq < num_seqs; ++seq) {
    const int64_t length = starts[seq + 1] - starts[seq];
    places.seq_lens[seq] = static_cast<int32_t>(length);
    for (int64_t i = 0; i < length; ++i) {
      places.slot_mapping[starts[seq] + i] = places.num_blocks * kMaxGroup + i;
    }
    for (int64_t i = 0; i * kMaxGroup < length; ++i) {
      places.block_table[seq * table_width + i] = static_cast<int32_t>(places.num_blocks++);
    }
  }
  return places;
}

Cache cache_in(Call& call, const Problem& p, int place_bytes) {
  const int64_t head_stride = static_cast<int64_t>(p.block_size) * place_bytes;
  const int64_t block_stride = p.num_kv_heads * head_stride;
  return {call.workspace<char>(p.num_blocks * block_stride), block_stride, head_stride};
}

// The output [T, H, padded head size] without its padding.
void copy_unpadded(const Problem& p, int64_t head_bytes, char* out) {
  for (int64_t row = 0; row < p.num_tokens * p.num_heads; ++row) {
    std::memcpy(out + row * head_bytes, p.out + row * p.value_bytes, head_bytes);
  }
}

// encoder_attention(Tensor q, Tensor k, Tensor v, Tensor query_start_loc, float scale) -> Tensor
void encoder_attention(Call& call) {
  const Tensor q = call.tensor(), k = call.tensor(), v = call.tensor(), query_start_loc = call.tensor();
  const double scale = call.number();
  check_encoder_tensors(q, k, v, query_start_loc);
  Problem p{};
  p.num_seqs = query_start_loc.sizes[0] - 1;
  p.query_start_loc = query_start_loc.as<int32_t>();
  const int64_t longest = longest_of(p.query_start_loc, p.num_seqs, q.sizes[0]);
  p.num_heads = p.num_kv_heads = static_cast<int>(q.sizes[1]);
  p.group = 1;
  p.head_dim = p.value_dim = static_cast<int>((q.sizes[2] + kHeadMultiple - 1) / kHeadMultiple * kHeadMultiple);
  p.block_size = kMaxGroup;
  p.element_bytes = static_cast<int>(element_size(q.dtype));
  p.key_bytes = p.value_bytes = p.head_dim * p.element_bytes;
  p.q = rows_for_worker(call, q, p.head_dim);
  p.k = rows_for_worker(call, k, p.head_dim);
  p.v = rows_for_worker(call, v, p.head_dim);
  p.block_table_stride = (longest + kMaxGroup - 1) / kMaxGroup;
  const Places places = place_tokens(call, p.query_start_loc, p.num_seqs, p.block_table_stride);
  p.num_blocks = places.num_blocks;
  p.seq_lens = places.seq_lens;
  p.block_table = places.block_table;
  p.slot_mapping = places.slot_mapping;
  p.k_cache = cache_in(call, p, p.key_bytes);
  p.v_cache = cache_in(call, p, p.value_bytes);
  p.scaling = {static_cast<float>(scale * 1.4426950408889634), 0.0f};  // logits to base 2, without a cap
  p.is_bidirectional = true;
  p.threads = call.threads();
  p.num_tokens = p.query_start_loc[p.num_seqs];
  write_cache(p, q.dtype);

  p.num_tokens = q.sizes[0];
  const Tensor out = call.empty(q.sizes, 3, q.dtype);
  const int64_t head_bytes = q.sizes[2] * p.element_bytes;
  const bool is_padded = head_bytes < p.value_bytes;
  p.out = is_padded ? call.workspace<char>(p.num_tokens * p.num_heads * p.value_bytes) : out.as<char>();
  zero_padding(p);
  attend_in(q.dtype, p);
  if (is_padded) copy_unpadded(p, head_bytes, out.as<char>());
  call.give(out);
}

}  // namespace

OSTINATO_KERNEL(encoder_attention, encoder_attention);

}  // namespace ostinato::attention
