// The first phase of a load: everything that a file's header and the caller's options decide,
// before anything is allocated.
#pragma once

#include <memory>
#include <string>

#include "backend.h"
#include "cache.h"
#include "format.h"
#include "tinyloop/tinyloop.h"

namespace tinyloop {

// Throws LoadError naming the field or the option that is not usable.
struct LoadSetup {
  LoadSetup(const std::string& path, const LoadOptions& options);
  std::string resolve_fp16_cache() const;

  LoadOptions options;  // resolved: no empty strings but those that mean the model's own
  MappedFile mapped;
  ModelFile file;         // points into `mapped`
  Descriptor descriptor;  // the file's, with the caller's choices
  CacheShape cache;
  std::unique_ptr<Backend> backend;
};

// Runs one phase of a load and puts its name before the message of a failure.
template <typename Phase>
void in_phase(const char* name, const std::string& path, Phase phase) {
  const auto where = [&] {
    return "load of '" + display(path) + "' failed in phase '" + name + "': ";
  };
  try {
    phase();
  } catch (const OutOfMemoryError& error) {
    throw OutOfMemoryError(where() + error.what());
  } catch (const LoadError& error) {
    throw LoadError(where() + error.what());
  } catch (const std::bad_alloc&) {
    throw OutOfMemoryError(where() + "the system has no memory for the load's own tables");
  }
}

}  // namespace tinyloop
