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

  const std::shared_ptr<PrefixState>& open() const {
    if (!state) throw ClosedHandleError("cannot use the prefix: it was closed");
    state->require_open();
    return state;
  }
};

struct PyResume {
  std::shared_ptr<ResumeState> state;

  const std::shared_ptr<ResumeState>& open() const {
    if (!state) throw ClosedHandleError("cannot use the resume handle: it was closed");
    state->require_open();
    return state;
  }
};

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
