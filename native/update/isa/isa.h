// Choice of instruction set at run time.
#pragma once

#include <string>
#include <vector>

#include "update/kernels/kernels.h"

namespace hetero {

// The instruction sets of this build that the machine and its operating system can run, best first.
std::vector<std::string> isa_available();

// The one in use: at first the best, or what HETERO_ISA names. Throws std::invalid_argument if
// HETERO_ISA names one that is not available.
std::string isa();

// Throws std::invalid_argument for a name that is not available.
void set_isa(const std::string& name);

// The loops of the instruction set in use. Throws like isa().
const Kernels& kernels();

}  // namespace hetero
