// What a load would hold, computed from the header of a file before anything is allocated.
#pragma once

#include <string>

#include "tinyloop/tinyloop.h"

namespace tinyloop {

// A mode that stores hidden states but needs no less memory than FP16 keys and values, in words
// with the numbers; "" if it saves.
std::string cache_mode_warning(const Descriptor& descriptor, const std::string& cache_mode);

}  // namespace tinyloop
