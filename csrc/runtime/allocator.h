#pragma once

namespace timelyfreeze {

// Keeps glibc's malloc from handing every large block back to the system: each activation would otherwise be mapped,
// faulted in page by page and unmapped again, under a lock that all the stage threads share. Applies to the process.
// Returns whether it took effect (false on other C libraries).
bool keep_large_blocks();

}  // namespace timelyfreeze
