// The records of a .tloop header: bounded reads, typed key-value sections, and taking known keys
// out of one. Nothing is trusted: every read is checked against what is left.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "tinyloop/errors.h"

namespace tinyloop::records {

[[noreturn]] inline void fail(const std::string& field, const std::string& found) {
  throw LoadError("cannot read the model file: " + field + ": " + found);
}

inline std::string text(uint64_t value) { return std::to_string(value); }

// Whether the bytes are UTF-8 as RFC 3629 has it: no overlong forms, surrogates or values past
// 10FFFF.
inline bool is_utf8(const std::string& bytes) {
  for (size_t i = 0; i < bytes.size();) {
    const auto lead = static_cast<uint8_t>(bytes[i]);
    const int more = lead < 0x80                   ? 0
                     : lead >= 0xC2 && lead < 0xE0 ? 1
                     : (lead >> 4) == 0xE          ? 2
                     : lead >= 0xF0 && lead < 0xF5 ? 3
                                                   : -1;
    if (more < 0 || i + static_cast<size_t>(more) >= bytes.size()) return false;
    for (int j = 1; j <= more; ++j) {
      const auto next = static_cast<uint8_t>(bytes[i + static_cast<size_t>(j)]);
      uint8_t low = 0x80, high = 0xBF;
      if (j == 1 && lead == 0xE0) low = 0xA0;
      if (j == 1 && lead == 0xED) high = 0x9F;
      if (j == 1 && lead == 0xF0) low = 0x90;
      if (j == 1 && lead == 0xF4) high = 0x8F;
      if (next < low || next > high) return false;
    }
    i += static_cast<size_t>(more) + 1;
  }
  return true;
}

// Reads the header in order; every read is checked against its end.
class Reader {
 public:
  Reader(const uint8_t* data, size_t bytes) : at_(data), left_(bytes) {}

  template <typename T>
  T number(const std::string& field) {
    T value;
    std::memcpy(&value, take(sizeof(T), field), sizeof(T));
    return value;
  }
  std::string bytes(size_t length, const std::string& field) {
    return std::string(reinterpret_cast<const char*>(take(length, field)), length);
  }
  std::string string(size_t length, const std::string& field) {
    std::string value = bytes(length, field);
    if (!is_utf8(value)) fail(field, "is not UTF-8 text");
    return value;
  }
  std::string short_string(const std::string& field) {
    return string(number<uint16_t>(field + " (length)"), field);
  }
  // A count of records that each take at least `smallest` bytes: a lie cannot make us allocate.
  uint32_t count(const std::string& field, size_t smallest) {
    const auto n = number<uint32_t>(field);
    if (n > left_ / smallest) {
      fail(field, text(n) + " records cannot fit in the " + text(left_) + " bytes that are left");
    }
    return n;
  }
  size_t left() const { return left_; }

 private:
  const uint8_t* take(size_t bytes, const std::string& field) {
    if (bytes > left_) {
      fail(field, "needs " + text(bytes) + " bytes, the header has " + text(left_) + " left");
    }
    const uint8_t* start = at_;
    at_ += bytes;
    left_ -= bytes;
    return start;
  }
  const uint8_t* at_;
  size_t left_;
};

enum ValueType : uint8_t { kInt = 1, kDouble = 2, kString = 3, kIntArray = 4, kBool = 5 };
using Value = std::variant<int64_t, double, std::string, std::vector<int64_t>, bool>;
using Values = std::map<std::string, Value>;

inline Value read_value(Reader& in, const std::string& field) {
  const auto type = in.number<uint8_t>(field + " (type)");
  switch (type) {
    case kInt:
      return in.number<int64_t>(field);
    case kDouble:
      return in.number<double>(field);
    case kString:
      return in.string(in.number<uint32_t>(field + " (length)"), field);
    case kIntArray: {
      std::vector<int64_t> values(in.count(field + " (count)", sizeof(int64_t)));
      for (int64_t& value : values) value = in.number<int64_t>(field);
      return values;
    }
    case kBool: {
      const auto flag = in.number<uint8_t>(field);
      if (flag > 1) fail(field, "a flag is 0 or 1, found " + text(flag));
      return flag == 1;
    }
    default:
      fail(field, "unknown value type " + text(type));
  }
}

inline Values read_values(Reader& in, const std::string& section) {
  Values values;
  const uint32_t n = in.count(section + " (count)", 4);
  for (uint32_t i = 0; i < n; ++i) {
    const std::string key = in.short_string(section + " key " + text(i));
    if (!values.emplace(key, read_value(in, section + "." + key)).second) {
      fail(section + "." + key, "the key occurs twice");
    }
  }
  return values;
}

// Takes known keys out of a section; what stays is unknown to this version.
class Fields {
 public:
  explicit Fields(Values values) : values_(std::move(values)) {}

  template <typename T>
  T take(const std::string& key) {
    const auto found = values_.find(key);
    if (found == values_.end()) fail("descriptor." + key, "is missing");
    const T* value = std::get_if<T>(&found->second);
    if (value == nullptr) fail("descriptor." + key, "has a value of the wrong type");
    T result = *value;
    values_.erase(found);
    return result;
  }
  int64_t take_int(const std::string& key, int64_t low, int64_t high) {
    const auto value = take<int64_t>(key);
    if (value < low || value > high) {
      fail("descriptor." + key, std::to_string(value) + " is outside " + std::to_string(low) +
                                    ".." + std::to_string(high));
    }
    return value;
  }
  // The same for keys that older files lack.
  template <typename T>
  T take_or(const std::string& key, const T& absent) {
    return values_.count(key) == 0 ? absent : take<T>(key);
  }
  int64_t take_count(const std::string& key, int64_t high) {
    return values_.count(key) == 0 ? 0 : take_int(key, 0, high);
  }
  void expect_empty() const {
    if (!values_.empty()) {
      fail("descriptor." + values_.begin()->first, "is a key that version 1 does not know");
    }
  }

 private:
  Values values_;
};

}  // namespace tinyloop::records
