# find_package(tinyloop) gives the target tinyloop::tinyloop: the static library and its headers.
include(CMakeFindDependencyMacro)
find_dependency(Threads)
include("${CMAKE_CURRENT_LIST_DIR}/tinyloopTargets.cmake")
