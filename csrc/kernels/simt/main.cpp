#include <cstdio>
#include <cstring>

namespace timelyfreeze::kernels::testing {
void test_activation();
void test_cross_entropy();
void test_machine();
void test_norm();
void test_rope();
}  // namespace timelyfreeze::kernels::testing

// Runs the tests of the kernels named, or all; a check that fails ends the process.
int main(int argc, char** argv) {
  using namespace timelyfreeze::kernels::testing;
  const struct {
    const char* name;
    void (*run)();
  } tests[] = {{"activation", test_activation},
               {"cross_entropy", test_cross_entropy},
               {"machine", test_machine},
               {"norm", test_norm},
               {"rope", test_rope}};
  int passed = 0;
  for (const auto& test : tests) {
    bool wanted = argc < 2;
    for (int i = 1; i < argc; ++i) wanted = wanted || std::strcmp(argv[i], test.name) == 0;
    if (!wanted) continue;
    test.run();
    std::printf("%s passed\n", test.name);
    std::fflush(stdout);
    ++passed;
  }
  return passed > 0 ? 0 : 1;
}
