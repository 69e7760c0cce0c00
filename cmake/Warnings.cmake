# brim_set_warnings(<target>...): the warnings our own code is held to. torch's headers come from
# SYSTEM targets and are not held to them.
function(brim_set_warnings)
  foreach(target IN LISTS ARGN)
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANG_AND_ID:CXX,GNU,Clang,AppleClang>:
        -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion
        -Wnon-virtual-dtor -Woverloaded-virtual -Wold-style-cast -Wformat=2 -Wundef>)
    if(BRIM_WARNINGS_AS_ERRORS)
      set_target_properties(${target} PROPERTIES COMPILE_WARNING_AS_ERROR ON)
    endif()
  endforeach()
endfunction()
