// The Python faces of a model and its handles: each holds a share of what it names until closed.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "engine.h"
#include "prefix.h"
#include "resume.h"

namespace tinyloop {

struct PyPrefix {
  std::shared_ptr<PrefixState> state;

  // what: the prefix as the caller knows it, for errors.
  const std::shared_ptr<PrefixState>& open(const std::string& what = "the prefix") const {
    if (!state) throw ClosedHandleError("cannot use " + what + ": it was closed");
    state->require_open(what);
    return state;
  }
};

struct PyResume {
  std::shared_ptr<ResumeState> state;

  const std::shared_ptr<ResumeState>& open(const std::string& what = "the resume handle") const {
    if (!state) throw ClosedHandleError("cannot use " + what + ": it was closed");
    state->require_open(what);
    return state;
  }
};

using Prefixes = std::optional<std::vector<std::optional<PyPrefix>>>;

// The state of each prefix, null where there is none. whose: what each belongs to, for errors.
std::vector<std::shared_ptr<PrefixState>> open_all(
    const std::vector<std::optional<PyPrefix>>& prefixes, const char* whose);

// Takes handles to `depth`; see upgrade() of resume.h. Called with the GIL.
void upgrade_without_gil(const std::shared_ptr<Engine>& engine,
                         const std::vector<std::shared_ptr<ResumeState>>& handles, int depth,
                         const std::vector<std::shared_ptr<PrefixState>>* prefixes);

class PyModel {
 public:
  PyModel(std::shared_ptr<Engine> engine, std::string digest)
      : engine_(std::move(engine)), digest_(std::move(digest)) {}

  const std::shared_ptr<Engine>& open() const {
    if (!engine_) throw ClosedHandleError("cannot use the model: it was closed");
    engine_->require_usable();
    return engine_;
  }
  bool closed() const { return !engine_; }
  void close();
  const std::string& digest() const { return digest_; }
  int depth_or_default(std::optional<int> depth) const {
    return depth ? *depth : static_cast<int>(open()->descriptor.loops);
  }

 private:
  std::shared_ptr<Engine> engine_;
  std::string digest_;
};

}  // namespace tinyloop
