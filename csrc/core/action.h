#pragma once
#include <cstdint>
#include <string>

namespace timelyfreeze {

// The letters are those of torch.distributed.pipelining's text form.
enum class Kind : char { forward = 'F', backward = 'B', input_grad = 'I', weight_grad = 'W' };

// One unit of work: `{stage}{kind}{microbatch}`, such as 1B3.
struct Action {
  int32_t stage = 0;
  Kind kind = Kind::forward;
  int32_t microbatch = 0;
};

std::string to_string(const Action& action);

}  // namespace timelyfreeze
