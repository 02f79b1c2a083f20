// streamkv._cpu: the CPU path for Python, each part bound in a file of its own.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace streamkv {

void bind_weights(nb::module_& m);
void bind_quantized(nb::module_& m);
void bind_kv_cache(nb::module_& m);
void bind_team(nb::module_& m);
void bind_tuning(nb::module_& m);
void bind_ops(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_sampler(nb::module_& m);
void bind_program(nb::module_& m);
void bind_channel(nb::module_& m);
void bind_mask_board(nb::module_& m);
void bind_runner(nb::module_& m);
void bind_peaks(nb::module_& m);

}  // namespace streamkv

NB_MODULE(_cpu, m) {
  using namespace streamkv;
  // What a process still holds when it ends is the system's to take back, and no news to its user.
  nb::set_leak_warnings(false);
  // Classes before the functions that take them.
  bind_weights(m);
  bind_quantized(m);
  bind_kv_cache(m);
  bind_team(m);
  bind_ops(m);
  bind_attention(m);
  bind_sampler(m);
  bind_program(m);
  bind_channel(m);
  bind_mask_board(m);
  bind_runner(m);
  bind_peaks(m);
  bind_tuning(m);
}
