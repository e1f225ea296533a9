#include "cuda/cublas_lt.h"

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/check.h"
#include "cuda/current_device.h"

namespace tinyloop::cuda {

namespace {

// The few declarations of cublasLt.h that are used here: its binary interface, stable since 11.
using Status = int;  // 0: success
using Handle = struct LtContext*;
using MatmulDesc = struct LtMatmulDesc*;
using Layout = struct LtLayout*;
using Preference = struct LtPreference*;
struct Algorithm {
  uint64_t data[8];
};
struct Heuristic {
  Algorithm algorithm;
  size_t workspace;
  Status state;
  float waves;
  int reserved[4];
};

constexpr int kCompute32F = 68;
constexpr int kFloat32 = 0, kFloat16 = 2;
constexpr int kDescTransA = 3;
constexpr int32_t kTranspose = 1;
constexpr int kPreferWorkspace = 1, kPreferReduction = 3, kPreferAlignmentA = 5;
constexpr int kAlgoId = 0, kAlgoTile = 1, kAlgoSplitK = 2, kAlgoReduction = 3, kAlgoSwizzle = 4,
              kAlgoCustom = 5, kAlgoStages = 6, kAlgoCluster = 8;

constexpr int64_t kRowsOfChoice = 2048;
constexpr uint32_t kAlignment = 16;

struct Functions {
  size_t (*get_version)();
  Status (*create)(Handle*);
  Status (*destroy)(Handle);
  Status (*desc_create)(MatmulDesc*, int compute, int scale);
  Status (*desc_destroy)(MatmulDesc);
  Status (*desc_set)(MatmulDesc, int attribute, const void*, size_t);
  Status (*layout_create)(Layout*, int type, uint64_t rows, uint64_t columns, int64_t ld);
  Status (*layout_destroy)(Layout);
  Status (*preference_create)(Preference*);
  Status (*preference_destroy)(Preference);
  Status (*preference_set)(Preference, int attribute, const void*, size_t);
  Status (*heuristic)(Handle, MatmulDesc, Layout a, Layout b, Layout c, Layout d, Preference,
                      int asked, Heuristic*, int* found);
  Status (*algo_get)(const Algorithm*, int attribute, void*, size_t, size_t* written);
  Status (*matmul)(Handle, MatmulDesc, const void* alpha, const void* a, Layout, const void* b,
                   Layout, const void* beta, const void* c, Layout, void* d, Layout,
                   const Algorithm*, void* workspace, size_t, cudaStream_t);
};

template <typename Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

bool find_all(void* library, Functions& f) {
  return find(library, "cublasLtGetVersion", f.get_version) &&
         find(library, "cublasLtCreate", f.create) && find(library, "cublasLtDestroy", f.destroy) &&
         find(library, "cublasLtMatmulDescCreate", f.desc_create) &&
         find(library, "cublasLtMatmulDescDestroy", f.desc_destroy) &&
         find(library, "cublasLtMatmulDescSetAttribute", f.desc_set) &&
         find(library, "cublasLtMatrixLayoutCreate", f.layout_create) &&
         find(library, "cublasLtMatrixLayoutDestroy", f.layout_destroy) &&
         find(library, "cublasLtMatmulPreferenceCreate", f.preference_create) &&
         find(library, "cublasLtMatmulPreferenceDestroy", f.preference_destroy) &&
         find(library, "cublasLtMatmulPreferenceSetAttribute", f.preference_set) &&
         find(library, "cublasLtMatmulAlgoGetHeuristic", f.heuristic) &&
         find(library, "cublasLtMatmulAlgoConfigGetAttribute", f.algo_get) &&
         find(library, "cublasLtMatmul", f.matmul);
}

std::vector<std::string> candidates(const std::string& packages) {
  // Whoever names a file wants that one.
  const std::string named = CublasLt::named_file();
  if (!named.empty()) return {named};
  std::vector<std::string> files;
  if (!packages.empty()) {
    files.push_back(packages + "/nvidia/cu13/lib/libcublasLt.so.13");
    files.push_back(packages + "/nvidia/cublas/lib/libcublasLt.so.13");
    files.push_back(packages + "/nvidia/cublas/lib/libcublasLt.so.12");
  }
  files.push_back("libcublasLt.so.13");
  files.push_back("libcublasLt.so.12");
  return files;
}

int out_type(OutputKind kind) { return kind == OutputKind::kActivations ? kFloat16 : kFloat32; }

// The three matrices of a product as cuBLASLt sees them, by columns: weight^T, rows, results.
class Layouts {
 public:
  Layouts(const Functions& f, const LtProduct& p) : f_(f) {
    const auto n = static_cast<uint64_t>(p.outputs), k = static_cast<uint64_t>(p.inputs),
               m = static_cast<uint64_t>(p.rows);
    ok_ = f.layout_create(&weight, kFloat16, k, n, p.weight_stride) == 0 &&
          f.layout_create(&in, kFloat16, k, m, p.in_stride) == 0 &&
          f.layout_create(&out, out_type(p.output.kind), n, m, p.output.stride) == 0;
  }
  ~Layouts() {
    for (const Layout layout : {weight, in, out}) {
      if (layout != nullptr) f_.layout_destroy(layout);
    }
  }
  Layouts(const Layouts&) = delete;
  Layouts& operator=(const Layouts&) = delete;
  bool ok() const { return ok_; }
  Layout weight = nullptr, in = nullptr, out = nullptr;

 private:
  const Functions& f_;
  bool ok_ = false;
};

struct Choice {
  bool found = false;
  Algorithm algorithm{};
};

}  // namespace

struct CublasLt::Library {
  void* file = nullptr;
  Functions f{};
  Handle handle = nullptr;
  MatmulDesc desc = nullptr;
  std::map<std::tuple<int64_t, int64_t, OutputKind>, Choice> choices;

  const HomeProcess home{};

  ~Library() {
    if (!home.here()) return;
    if (desc != nullptr) f.desc_destroy(desc);
    if (handle != nullptr) f.destroy(handle);
    // The file stays open: libraries of this size do not always survive being closed.
  }

  bool start() {
    if (f.create(&handle) != 0) return false;
    if (f.desc_create(&desc, kCompute32F, kFloat32) != 0) return false;
    return f.desc_set(desc, kDescTransA, &kTranspose, sizeof kTranspose) == 0;
  }

  uint32_t attribute(const Algorithm& algorithm, int which) const {
    uint32_t value = 0;
    size_t written = 0;
    f.algo_get(&algorithm, which, &value, sizeof value, &written);
    return value;
  }
  bool one_chain(const Algorithm& algorithm) const {
    return attribute(algorithm, kAlgoSplitK) <= 1 && attribute(algorithm, kAlgoReduction) == 0;
  }

  Choice choose(int64_t outputs, int64_t inputs, OutputKind kind) const {
    LtProduct p;
    p.outputs = outputs;
    p.inputs = p.weight_stride = p.in_stride = inputs;
    p.rows = kRowsOfChoice;
    p.output.kind = kind;
    p.output.stride = outputs;
    const Layouts layouts(f, p);
    Preference preference = nullptr;
    Choice choice;
    if (!layouts.ok() || f.preference_create(&preference) != 0) return choice;
    const uint64_t no_workspace = 0;
    const uint32_t no_reduction = 0;
    f.preference_set(preference, kPreferWorkspace, &no_workspace, sizeof no_workspace);
    f.preference_set(preference, kPreferReduction, &no_reduction, sizeof no_reduction);
    for (int matrix = 0; matrix < 4; ++matrix) {
      f.preference_set(preference, kPreferAlignmentA + matrix, &kAlignment, sizeof kAlignment);
    }
    Heuristic results[8] = {};
    int found = 0;
    f.heuristic(handle, desc, layouts.weight, layouts.in, layouts.out, layouts.out, preference, 8,
                results, &found);
    f.preference_destroy(preference);
    for (int i = 0; i < found && !choice.found; ++i) {
      if (results[i].state != 0 || results[i].workspace != 0) continue;
      if (!one_chain(results[i].algorithm)) continue;
      choice.found = true;
      choice.algorithm = results[i].algorithm;
    }
    return choice;
  }

  const Choice& choice(int64_t outputs, int64_t inputs, OutputKind kind) {
    const auto key = std::make_tuple(outputs, inputs, kind);
    const auto known = choices.find(key);
    if (known != choices.end()) return known->second;
    return choices.emplace(key, choose(outputs, inputs, kind)).first->second;
  }
};

CublasLt::CublasLt() : library_(std::make_unique<Library>()) {}
CublasLt::~CublasLt() = default;

std::string CublasLt::named_file() {
  const char* named = std::getenv("TINYLOOP_CUBLASLT");
  return named != nullptr ? named : "";
}

std::unique_ptr<CublasLt> CublasLt::open(const std::string& packages, std::string& why_not) {
  why_not = "cannot open cuBLASLt:";
  for (const std::string& file : candidates(packages)) {
    void* opened = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (opened == nullptr) {
      why_not += std::string(" ") + dlerror() + ";";
      continue;
    }
    std::unique_ptr<CublasLt> lt(new CublasLt());
    lt->library_->file = opened;
    if (find_all(opened, lt->library_->f) && lt->library_->start()) {
      why_not.clear();
      return lt;
    }
    why_not += " " + file + ": lacks a function, or gives no handle;";
  }
  return nullptr;
}

bool CublasLt::multiply(cudaStream_t stream, const LtProduct& product) {
  Library& lib = *library_;
  const Choice& choice = lib.choice(product.outputs, product.inputs, product.output.kind);
  if (!choice.found) return false;
  const Layouts layouts(lib.f, product);
  if (!layouts.ok()) return false;
  const float one = 1.0f;
  const float beta = product.output.kind == OutputKind::kAdd ? 1.0f : 0.0f;
  void* out = product.output.data;
  return lib.f.matmul(lib.handle, lib.desc, &one, product.weight, layouts.weight, product.in,
                      layouts.in, &beta, out, layouts.out, out, layouts.out, &choice.algorithm,
                      nullptr, 0, stream) == 0;
}

size_t CublasLt::version() const { return library_->f.get_version(); }

std::string CublasLt::algorithm(int64_t outputs, int64_t inputs, OutputKind kind) {
  const Choice& choice = library_->choice(outputs, inputs, kind);
  if (!choice.found) return "none";
  const auto value = [&](int which) {
    return std::to_string(library_->attribute(choice.algorithm, which));
  };
  return "id " + value(kAlgoId) + " tile " + value(kAlgoTile) + " stages " + value(kAlgoStages) +
         " cluster " + value(kAlgoCluster) + " swizzle " + value(kAlgoSwizzle) + " custom " +
         value(kAlgoCustom) + " split " + value(kAlgoSplitK) + " reduction " +
         value(kAlgoReduction);
}

}  // namespace tinyloop::cuda
