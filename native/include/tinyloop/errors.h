// The errors of the engine. Every message says what was attempted with which values, what was
// found, and what to do. The Python face has a class of the same name for each.
#pragma once

#include <stdexcept>
#include <string>

namespace tinyloop {

// Base of all errors that the engine throws on purpose.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A model file or the options of a load are not usable. The text names the field.
class LoadError : public Error {
 public:
  using Error::Error;
};

// An allocation would pass the budget, or the system refused it. Nothing was changed.
class OutOfMemoryError : public Error {
 public:
  using Error::Error;
};

// One sequence brings more new rows than max_seq_len.
class RowBudgetError : public Error {
 public:
  using Error::Error;
};

// A second call while a forward runs, or a call from a forked child. Nothing was changed.
class ConcurrentUseError : public Error {
 public:
  using Error::Error;
};

// A handle, or the model behind it, was closed.
class ClosedHandleError : public Error {
 public:
  using Error::Error;
};

// A handle of another model, or a prefix at a depth that cannot serve the request.
class MismatchError : public Error {
 public:
  using Error::Error;
};

// The caller's values: a token id outside the vocabulary, an empty sequence, a bad depth.
class InvalidInputError : public Error {
 public:
  using Error::Error;
};

// The GPU or its driver failed. After some failures (the driver calls them sticky) no call of this
// process succeeds on that device any more.
class DeviceError : public Error {
 public:
  using Error::Error;
};

}  // namespace tinyloop
