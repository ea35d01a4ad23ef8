#pragma once
// A test is a function registered by name; a CHECK that fails ends the process.
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"

namespace timelyfreeze::testing {

using Test = std::pair<std::string, void (*)()>;

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Register {
  Register(const char* name, void (*body)()) { tests().emplace_back(name, body); }
};

}  // namespace timelyfreeze::testing

#define TEST(name)                                                            \
  static void name();                                                         \
  static const timelyfreeze::testing::Register register_##name(#name, &name); \
  static void name()
