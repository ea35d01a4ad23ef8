#include "core/action.h"

namespace timelyfreeze {

std::string to_string(const Action& action) {
  return std::to_string(action.stage) + static_cast<char>(action.kind) + std::to_string(action.microbatch);
}

}  // namespace timelyfreeze
