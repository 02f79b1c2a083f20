// streamkv._cpu.Team: see team.h. What runs on it releases the interpreter.
#include "streamkv/team.h"

#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace streamkv {

void bind_team(nb::module_& m) {
  nb::class_<Team>(m, "Team",
                   "Threads that compute together, the calling one included. One caller at a time.")
      .def(nb::init<int64_t>(), nb::arg("num_threads"))
      .def_prop_ro("num_threads", &Team::num_threads);
}

}  // namespace streamkv
