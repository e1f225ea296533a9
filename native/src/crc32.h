// CRC-32 as zlib defines it (reflected polynomial 0xEDB88320), so that Python's zlib.crc32 agrees.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tinyloop {

uint32_t crc32(const void* data, size_t bytes);

}  // namespace tinyloop
