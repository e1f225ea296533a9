// A device made current for a scope, in calls that may come from any thread at any time.
#pragma once

#include <unistd.h>

namespace tinyloop::cuda {

// The process that a device object was made in. In a forked child the parent's device memory and
// streams do not exist, and the runtime must not be called.
class HomeProcess {
 public:
  bool here() const { return getpid() == pid_; }

 private:
  pid_t pid_ = getpid();
};

// Restores the caller's device. A thread whose device was never used by this process keeps ours:
// to make the other current would build a context there, which takes hundreds of megabytes.
//
// Not ok() where the device cannot be made current, as when the process is exiting and the runtime
// is gone: the device's memory goes with it.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  bool ok() const { return ok_; }

 private:
  int before_ = 0;
  bool ok_ = false;
  bool restore_ = false;
};

}  // namespace tinyloop::cuda
