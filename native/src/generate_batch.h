// A batch of sequences that lives between its steps: requests join, decode and leave at any of
// them, and the model may do other work in between.
#pragma once

#include <cstddef>
#include <memory>

#include "generate.h"

namespace tinyloop {

// A completion depends on its own request only: not on when it joined, who was there, or what the
// model did between two steps. Every call but take_events() and the counts is made under the
// engine's ForwardGuard. What a step throws otherwise (an interrupt, a broken device) leaves the
// batch as it was before the step.
class GenerateBatch {
 public:
  GenerateBatch() = default;
  virtual ~GenerateBatch() = default;
  GenerateBatch(const GenerateBatch&) = delete;
  GenerateBatch& operator=(const GenerateBatch&) = delete;

  // Takes a request in; it runs from the next step on. Its key: 0, 1, 2 and so on. Throws what
  // refuses the request, and nothing has changed then.
  virtual size_t add(const GenerateItem& item) = 0;
  // Forgets a request and frees its memory. False if it has ended before.
  virtual bool cancel(size_t key) = 0;
  // One pass over the model. False if there was nothing to do.
  virtual bool step() = 0;
  // Frees the memory of all sequences, which go on later to the same numbers; those with an early
  // exit keep theirs.
  virtual void put_back() = 0;
  // What happened since the last call.
  virtual GenerateEvents take_events() = 0;
  virtual size_t running() const = 0;
  virtual size_t waiting() const = 0;
};

// max_batch: most sequences at a time; 0: 64.
std::unique_ptr<GenerateBatch> start_batch(const std::shared_ptr<Engine>& engine, int max_batch);

}  // namespace tinyloop
