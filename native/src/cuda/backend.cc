#include "backend.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "cuda/attention.h"
#include "cuda/check.h"
#include "cuda/chunk_plan.h"
#include "cuda/cublas_lt.h"
#include "cuda/current_device.h"
#include "cuda/device_memory.h"
#include "cuda/device_weight.h"
#include "cuda/pinned.h"
#include "cuda/replay.h"
#include "cuda/rows.h"
#include "cuda/workspace.h"

namespace tinyloop {

namespace {

using namespace cuda;

// Raised whenever a change of the kernels changes a bit of any result.
constexpr const char* kKernelVersion = "g1";
// The oldest that the build has code for: Ampere's matrix instructions.
constexpr int kLeastCapability = 80;
// Where tests/native/cpp/cuda/linear_test.cu has held cuBLASLt's bits against our own.
constexpr int kCheckedCapability = 90;
// Of the steps that the fast class computes: chains of an output, and most rows. With more rows the
// weights' tiles are shared by rows enough to keep the device busy.
constexpr int kFastParts = 4;
constexpr int64_t kFastRows = 8;
// Of blocks: what every kernel's vector loads and the library's matrices want.
constexpr size_t kBlockAlignment = 256;

// The stream and what lives on it, in the process that made them.
class Device {
 public:
  explicit Device(int index) : memory(std::make_shared<DeviceMemory>(index)), index_(index) {
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "make a stream");
    try {
      ring.emplace(index, stream);
    } catch (...) {
      cudaStreamDestroy(stream);
      throw;
    }
    replays.emplace(stream);
    memory->use_stream(stream);
  }
  ~Device() {
    if (!home_.here()) return;
    const CurrentDevice current(index_);
    if (!current.ok()) return;
    cudaStreamSynchronize(stream);
    memory->use_stream(nullptr);
    replays.reset();
    ring.reset();
    cudaStreamDestroy(stream);
    cudaGetLastError();
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const std::shared_ptr<DeviceMemory> memory;
  cudaStream_t stream = nullptr;
  std::optional<PinnedRing> ring;
  std::optional<Replays> replays;

 private:
  const int index_;
  const HomeProcess home_;
};

class CudaBackend : public Backend {
 public:
  explicit CudaBackend(const CudaOptions& options) : options_(options) {}

  // ---- the device ------------------------------------------------------------------------------

  std::string identity() const override {
    // The toolkit's library of functions (exp, sin) is part of the numbers.
    return "cuda/sm" + std::to_string(capability_) + "/" + library_ + "/" + kKernelVersion +
           "-nvcc" + std::to_string(CUDART_VERSION) + (options_.fast ? "/fast" : "");
  }
  size_t activation_bytes() const override { return options_.fp32 ? 4 : 2; }
  size_t alignment() const override { return kBlockAlignment; }
  bool is_host() const override { return false; }
  int64_t waits() const override { return device_->ring->waits(); }
  std::shared_ptr<MemorySource> memory() const override { return device_->memory; }

  void start() override {
    const std::vector<CudaDevice> devices = cuda_devices();
    const auto found = std::find_if(devices.begin(), devices.end(), [&](const CudaDevice& d) {
      return d.index == options_.device;
    });
    if (found == devices.end()) {
      throw LoadError("cannot load on device cuda:" + std::to_string(options_.device) + ": " +
                      std::to_string(devices.size()) +
                      " usable GPUs were found; use device='cpu', or check the driver");
    }
    capability_ = found->capability;
    const CurrentDevice current(options_.device);
    if (!current.ok()) {
      throw LoadError("cannot load on device cuda:" + std::to_string(options_.device) +
                      ": the driver does not let this process use it");
    }
    device_ = std::make_unique<Device>(options_.device);
    context_ = linear_context(options_.fp32);
    // Without the library our own kernels do the work, with the same bits, and identity() says so.
    // Elsewhere than on Hopper nobody has checked that its sums are the one chain that ours are.
    std::string why_not;
    const bool checked = capability_ == kCheckedCapability;
    const std::string named = CublasLt::named_file();
    if (!options_.fp32 && checked && named != "off") {
      blas_ = CublasLt::open(options_.packages, why_not);
      if (!blas_ && !named.empty()) {
        throw LoadError("cannot load with TINYLOOP_CUBLASLT='" + named + "': " + why_not +
                        " name the library's file, or say off");
      }
    }
    context_.cublas_lt = blas_.get();
    if (blas_) library_ = "cublaslt-" + std::to_string(blas_->version());
    uploader_.emplace(device_->stream, *device_->ring);
  }

  void enter() override {
    current_.emplace(options_.device);
    if (!current_->ok()) {
      current_.reset();
      throw DeviceError("cannot use device cuda:" + std::to_string(options_.device) +
                        ": the driver does not let this thread use it");
    }
  }
  void leave() noexcept override {
    // What an exception left. A recording must be ended by the thread that began it.
    pending_ = std::monostate();
    context_.parts = 1;
    if (device_->replays->recording()) {
      device_->replays->abandon();
      device_->memory->let_chunks_go();
    }
    current_.reset();
  }

  void write(void* to, const void* host, size_t bytes) override {
    flush();
    device_->ring->write(to, host, bytes);
  }
  void read(void* host, const void* from, size_t bytes) override {
    flush();
    device_->ring->read(host, from, bytes);
  }
  void copy(void* to, const void* from, size_t bytes) override {
    flush();
    cuda::copy(stream(), to, from, bytes);
  }
  void fill_zero(void* to, size_t bytes) override {
    flush();
    cuda::fill_zero(stream(), to, bytes);
  }

  // ---- weights and working memory --------------------------------------------------------------

  std::unique_ptr<Weight> upload(const TensorEntry& tensor, int64_t begin, int64_t end,
                                 WeightUse use, Account& account) override {
    const WeightShape shape{tensor.kind,  end - begin,   tensor.cols,
                            tensor.group, options_.fp32, is_cached(use)};
    return uploader_->upload(tensor, begin, shape, account);
  }
  std::vector<size_t> upload_bytes(TensorKind kind, int64_t outputs, int64_t inputs, int64_t group,
                                   WeightUse use) const override {
    return weight_allocations({kind, outputs, inputs, group, options_.fp32, is_cached(use)});
  }

  std::vector<size_t> workspace_bytes(const WorkspaceShape& shape) const override {
    return workspace_sizes(shape, options_.fp32, options_.fp16_cache == "all").all();
  }
  void allocate_workspace(const WorkspaceShape& shape, Account& account) override {
    check(cudaStreamSynchronize(stream()), "load weights");
    shape_ = shape;
    account_ = account.shared_from_this();
    const WorkspaceSizes sizes =
        workspace_sizes(shape, options_.fp32, options_.fp16_cache == "all");
    const auto take = [&](size_t bytes, const char* what) {
      return account.allocate(bytes, Owner::kWorkspace, what);
    };
    linear_ = take(sizes.linear, "product scratch");
    tile_ = take(sizes.tile, "a tile of logits");
    partials_ = take(sizes.partials, "head partials");
    row_results_ = take(sizes.row_results, "head results");
    // They are read back as a whole, also where a call asks for some of them only.
    fill_zero(row_results_.as<void>(), sizes.row_results);
    integers_ = take(sizes.integers, "row tables");
    gathered_ = take(sizes.gathered, "head rows");
    attention_ = take(sizes.attention, "attention partials");
    arena_.allocate(shape.rows, account);
    context_.scratch = linear_.as<void>();
    context_.scratch_bytes = sizes.linear;
    const bool unpacks = weight_scratch(shape, options_.fp32, options_.fp16_cache == "all");
    context_.weight_scratch_bytes = unpacks ? kWeightScratch : 0;
  }

  // ---- states and products ---------------------------------------------------------------------

  void embed(const Weight& weight, const int32_t* ids, int64_t rows, float scale,
             float* state) override {
    flush();
    cuda::embed(stream(), fp32(), view_of(weight), upload_rows(kIds, ids, rows), rows, scale,
                state);
  }
  void norm_linear(const float* state, const NormSpec& norm, int64_t rows, const Weight& weight,
                   Rows out) override {
    LinearCall call = call_of(weight, rows);
    call.output = into(out);
    const auto* added = std::get_if<NormAdd>(&pending_);
    if (added != nullptr && added->state == state && added->rows == rows) {
      const Rows normed{static_cast<uint8_t*>(context_.scratch) + context_.weight_scratch_bytes,
                        added->width};
      norm_add_norm_rows(stream(), fp32(), added->branch, added->norm, rows, added->width,
                         added->state, norm, normed);
      pending_ = std::monostate();
      call.input.rows = normed.data;
      call.input.stride = normed.stride;
    } else {
      flush();
      call.input.kind = InputKind::kState;
      call.input.state = state;
      call.input.norm = norm;
    }
    cuda::linear(stream(), call, context_);
  }
  void linear(Rows in, int64_t rows, const Weight& weight, Rows out) override {
    flush();
    LinearCall call = call_of(weight, rows);
    call.input.rows = in.data;
    call.input.stride = in.stride;
    call.output = into(out);
    cuda::linear(stream(), call, context_);
  }
  void linear_add(Rows in, int64_t rows, const Weight& weight, float* state) override {
    flush();
    LinearCall call = call_of(weight, rows);
    call.input.rows = in.data;
    call.input.stride = in.stride;
    call.output = {OutputKind::kAdd, state, call.weight.outputs};
    cuda::linear(stream(), call, context_);
  }
  void adapter(float* state, const float* input, int64_t rows, const Weight& weight) override {
    flush();
    LinearCall call = call_of(weight, rows);
    call.input.kind = InputKind::kPair;
    call.input.state = state;
    call.input.other = input;
    call.output = {OutputKind::kFloat, state, call.weight.outputs};
    cuda::linear(stream(), call, context_);
  }

  void norm(float* state, const NormSpec& norm, int64_t rows, int64_t width) override {
    flush();
    if (norm.present) cuda::norm(stream(), state, norm, rows, width);
  }
  void norm_add(Rows branch, const NormSpec& norm, int64_t rows, int64_t width,
                float* state) override {
    flush();
    // Its reader is likely the next norm: one kernel for both.
    pending_ = NormAdd{branch, norm, rows, width, state};
  }
  void permute(void* data, int64_t row_bytes, int64_t rows, const int32_t* from) override {
    flush();
    cuda::permute(stream(), data, row_bytes, rows, upload_rows(kHeadRows, from, rows),
                  tile_.as<void>());
  }
  void add(float* state, const float* other, int64_t rows, int64_t width) override {
    flush();
    cuda::add(stream(), state, other, rows, width);
  }
  void broadcast(float* state, const float* row, int64_t rows, int64_t width) override {
    flush();
    cuda::broadcast_row(stream(), row, rows, width, state);
  }
  void init_normal(float* state, const int32_t* positions, int64_t rows, int64_t width, float std,
                   uint64_t seed) override {
    flush();
    cuda::init_normal(stream(), state, upload_rows(kPositions, positions, rows), rows, width, std,
                      seed);
  }

  // ---- heads and attention ---------------------------------------------------------------------

  std::unique_ptr<ChunkPlan> plan_chunk(ChunkWork work) override {
    return std::make_unique<DevicePlan>(work, arena_, *account_, *device_->ring);
  }
  bool begin_steps(const StepKey& key, const ChunkPlan& chunk) override {
    flush();
    const DevicePlan& plan = device_plan(chunk);
    if (!plan.attention.decode) return true;
    if (options_.fast && plan.rows <= kFastRows) context_.parts = kFastParts;
    const ReplayKey replay{key, plan.attention.max_spans, plan.place};
    // A block freed by another thread may wait for the stream, which would spoil the recording.
    const bool records = device_->replays->will_record(replay);
    if (records) device_->memory->hold_chunks();
    try {
      return device_->replays->begin(replay);
    } catch (...) {
      if (records) device_->memory->let_chunks_go();
      throw;
    }
  }
  bool end_steps() override {
    flush();
    context_.parts = 1;
    if (!device_->replays->recording()) return true;
    try {
      const bool launched = device_->replays->end();
      device_->memory->let_chunks_go();
      return launched;
    } catch (...) {
      device_->memory->let_chunks_go();
      throw;
    }
  }

  void norm_store(const float* state, const NormSpec& norm, int64_t rows, int64_t width,
                  const ChunkPlan& plan, int64_t plane, Rows out, Rows read_back) override {
    flush();
    cuda::norm_store(stream(), fp32(), state, norm, rows, width, device_plan(plan).hidden, plane,
                     out, read_back);
  }
  void load_hidden(const HiddenSegment& from, int64_t plane, int64_t token, int64_t rows,
                   int64_t width, Rows out) override {
    flush();
    cuda::load_hidden(stream(), fp32(), from, plane, token, rows, width, out);
  }
  // There may be more positions than rows of a pass, when a long prefix is rebuilt.
  void rope(const float* inv_freq, int64_t head_dim, const int32_t* positions, int64_t rows,
            float* out) override {
    flush();
    for (int64_t first = 0; first < rows; first += shape_.rows) {
      const int64_t n = std::min(shape_.rows, rows - first);
      rope_table(stream(), upload_rows(kPositions, positions + first, n), inv_freq, n, head_dim,
                 out + first * head_dim);
    }
  }
  void prepare_heads(Rows qkv, const float* rope, int64_t rows, const HeadShape& shape,
                     const HeadPrep& prep) override {
    flush();
    pending_ = Heads{qkv, rope, rows, shape, prep};
  }
  void store_kv(Rows qkv, const HeadShape& shape, const ChunkPlan& plan, int64_t plane) override {
    const DevicePlan& chunk = device_plan(plan);
    store(qkv, shape, chunk.rows, chunk.kv, plane);
  }
  void store_kv(Rows qkv, const HeadShape& shape, const KvRun& run, int64_t plane) override {
    store(qkv, shape, run.rows, single_run(run), plane);
  }
  void attention(const ChunkPlan& plan, const HeadShape& shape, int64_t plane, Rows queries,
                 Rows out) override {
    flush();
    cuda::attention(stream(), device_plan(plan).attention, shape, plane, queries, out, fp32(),
                    attention_.as<void>(), attention_.bytes());
  }
  int64_t attention_rows(const HeadShape& shape) const override {
    return cuda::attention_rows(shape);
  }
  void gate_mul(Rows gate, int64_t rows, int64_t width, Rows out) override {
    flush();
    cuda::gate_mul(stream(), fp32(), gate, rows, width, out);
  }
  void silu_mul(Rows gate_up, int64_t rows, int64_t width, Rows out) override {
    flush();
    cuda::silu_mul(stream(), fp32(), gate_up, rows, width, out);
  }

  // ---- the head --------------------------------------------------------------------------------

  void score_head(const float* state, const int32_t* rows, const int32_t* targets, int64_t n,
                  const Weight& head, const HeadScores& out) override {
    flush();
    const int64_t most = head_rows(shape_);
    for (int64_t first = 0; first < n; first += most) {
      const int64_t block = std::min(most, n - first);
      const int32_t* at = targets == nullptr ? nullptr : targets + first;
      run_head(state, rows + first, at, block, head);
      // All of them at once: a read waits for the device, and each wait takes longer than the copy.
      host_results_.resize(results_bytes(block));
      read(host_results_.data(), row_results_.as<void>(), host_results_.size());
      const HeadResults results = results_in(host_results_.data(), block);
      const auto take = [&](auto* to, const auto* from) {
        if (to != nullptr) std::copy_n(from, block, to + first);
      };
      if (targets != nullptr) {
        take(out.logprobs, results.logprobs);
        take(out.greedy, results.greedy);
      }
      take(out.best, results.best);
      take(out.best_logprobs, results.best_logprobs);
    }
  }
  // Row by row where the vocabulary does not fit a tile as often.
  void logits(const float* state, const int32_t* rows, int64_t n, const Weight& head, float* out,
              double* log_sums) override {
    flush();
    const int64_t vocab = view_of(head).outputs;
    const int64_t most = tile_columns(shape_, n) == vocab ? n : 1;
    for (int64_t first = 0; first < n; first += most) {
      const int64_t block = std::min(most, n - first);
      const HeadResults results = run_head(state, rows + first, nullptr, block, head);
      read(out + first * vocab, tile_.as<float>(),
           static_cast<size_t>(block * vocab) * sizeof(float));
      read(log_sums + first, results.log_sums, static_cast<size_t>(block) * sizeof(double));
    }
  }
  void exit_gate(const float* state, const int32_t* rows, int64_t n, int64_t width,
                 const float* weight, const float* bias, float* out) override {
    flush();
    const int64_t most = head_rows(shape_);
    float* const gates = row_results_.as<float>();
    for (int64_t first = 0; first < n; first += most) {
      const int64_t block = std::min(most, n - first);
      cuda::exit_gate(stream(), state, upload_rows(kHeadRows, rows + first, block), block, width,
                      weight, bias, gates);
      read(out + first, gates, static_cast<size_t>(block) * sizeof(float));
    }
  }

 private:
  // The parts of `integers_`, one for each kind of table.
  enum Table { kIds, kPositions, kHeadRows, kTargets };

  // An operation that waits for the next one, in case one kernel can do both. The bits are those of
  // the two one after the other.
  struct NormAdd {
    Rows branch;
    NormSpec norm;
    int64_t rows = 0;
    int64_t width = 0;
    float* state = nullptr;
  };
  struct Heads {
    Rows qkv;
    const float* rope = nullptr;
    int64_t rows = 0;
    HeadShape shape;
    HeadPrep prep;
  };
  void flush() {
    const auto pending = std::exchange(pending_, std::monostate());
    if (const auto* p = std::get_if<NormAdd>(&pending)) {
      cuda::norm_add(stream(), fp32(), p->branch, p->norm, p->rows, p->width, p->state);
    } else if (const auto* h = std::get_if<Heads>(&pending)) {
      cuda::prepare_heads(stream(), fp32(), h->qkv, h->rope, h->rows, h->shape, h->prep);
    }
  }
  // Keys and values of rows whose heads may still wait to be prepared: then nobody reads them where
  // they lie, only where they are stored.
  void store(Rows qkv, const HeadShape& shape, int64_t rows, const RunTable<KvRun>& runs,
             int64_t plane) {
    const auto* heads = std::get_if<Heads>(&pending_);
    if (heads != nullptr && heads->qkv.data == qkv.data && heads->rows == rows) {
      prepare_and_store(stream(), fp32(), qkv, heads->rope, rows, shape, heads->prep, runs, plane);
      pending_ = std::monostate();
      return;
    }
    flush();
    cuda::store_kv(stream(), fp32(), qkv, shape, rows, runs, plane);
  }

  cudaStream_t stream() const { return device_->stream; }
  bool fp32() const { return options_.fp32; }
  bool is_cached(WeightUse use) const {
    return options_.fp16_cache == "all" ||
           (options_.fp16_cache == "loop" && use == WeightUse::kLoop);
  }

  const int32_t* upload_rows(Table table, const int32_t* host, int64_t n) {
    int32_t* const to = integers_.as<int32_t>() + table * shape_.rows;
    write(to, host, static_cast<size_t>(n) * sizeof(int32_t));
    return to;
  }

  LinearCall call_of(const Weight& weight, int64_t rows) const {
    LinearCall call;
    call.rows = rows;
    call.weight = view_of(weight);
    return call;
  }
  static LinearOutput into(Rows out) { return {OutputKind::kActivations, out.data, out.stride}; }

  // The head's results for n rows, side by side, those of 8 bytes first; the last array but one
  // holds the targets' logits.
  static HeadResults results_in(uint8_t* memory, int64_t n) {
    HeadResults out;
    out.log_sums = reinterpret_cast<double*>(memory);
    out.logprobs = reinterpret_cast<float*>(out.log_sums + n);
    out.best_logprobs = out.logprobs + n;
    out.best = reinterpret_cast<int32_t*>(out.best_logprobs + 2 * n);
    out.greedy = reinterpret_cast<uint8_t*>(out.best + n);
    return out;
  }
  static float* target_logits(const HeadResults& results, int64_t n) {
    return results.best_logprobs + n;
  }

  // The head at `n` rows, at most head_rows(): tile after tile of the vocabulary, the last tile's
  // logits stay.
  HeadResults run_head(const float* state, const int32_t* rows, const int32_t* targets, int64_t n,
                       const Weight& head) {
    const DeviceWeight& weight = view_of(head);
    const int64_t width = weight.inputs, vocab = weight.outputs;
    const int32_t* indices = upload_rows(kHeadRows, rows, n);
    const int32_t* wanted = targets == nullptr ? nullptr : upload_rows(kTargets, targets, n);
    const Rows gathered{gathered_.as<uint8_t>(), width};
    gather_rows(stream(), fp32(), state, indices, n, width, gathered);
    const int64_t columns = tile_columns(shape_, n), partials = head_partials(vocab);
    float* const logits = tile_.as<float>();
    const HeadResults out = results_in(row_results_.as<uint8_t>(), n);
    float* const target = target_logits(out, n);
    for (int64_t first = 0; first < vocab; first += columns) {
      const int64_t end = std::min(first + columns, vocab);
      LinearCall call;
      call.rows = n;
      call.weight = slice(weight, first, end);
      call.input.rows = gathered.data;
      call.input.stride = gathered.stride;
      call.output = {OutputKind::kFloat, logits, end - first};
      cuda::linear(stream(), call, context_);
      fold_logits(stream(), logits, end - first, n, first, end - first, wanted, target,
                  partials_.as<HeadPartial>(), partials);
    }
    finish_rows(stream(), partials_.as<HeadPartial>(), partials, n, wanted, target, out);
    return out;
  }

  const CudaOptions options_;
  int capability_ = 0;
  std::string library_ = "own";
  std::unique_ptr<Device> device_;
  std::optional<CurrentDevice> current_;
  std::unique_ptr<CublasLt> blas_;
  LinearContext context_;
  std::variant<std::monostate, NormAdd, Heads> pending_;
  std::optional<Uploader> uploader_;
  WorkspaceShape shape_;
  std::shared_ptr<Account> account_;
  PlanArena arena_;
  std::vector<uint8_t> host_results_;
  Block linear_, tile_, partials_, row_results_, integers_, gathered_, attention_;
};

}  // namespace

std::unique_ptr<Backend> make_cuda_backend(const CudaOptions& options) {
  return std::make_unique<CudaBackend>(options);
}

bool has_cuda_backend() { return true; }

std::vector<CudaDevice> cuda_devices() {
  int count = 0;
  std::vector<CudaDevice> devices;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();  // no driver, or no device
    return devices;
  }
  for (int index = 0; index < count; ++index) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, index) != cudaSuccess) {
      cudaGetLastError();
      continue;
    }
    const int capability = 10 * properties.major + properties.minor;
    if (capability < kLeastCapability) continue;
    devices.push_back({index, properties.name, capability, properties.totalGlobalMem});
  }
  return devices;
}

}  // namespace tinyloop
