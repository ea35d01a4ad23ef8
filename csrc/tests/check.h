#pragma once
// A test is a function registered by name; a check that fails says where and ends the process with 1.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

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

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                \
    }                                                                              \
  } while (false)
