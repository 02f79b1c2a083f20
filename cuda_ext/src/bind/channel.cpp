// streamkv._cpu.Channel: see channel.h.
#include "streamkv/channel.h"

#include <nanobind/nanobind.h>

#include <string>

#include "messages.h"

namespace nb = nanobind;

namespace streamkv {
namespace {

nb::object receive(Channel& channel, double timeout_s) {
  std::string message;
  Received received;
  {
    const nb::gil_scoped_release no_gil;
    received = channel.receive(message, to_nanoseconds(timeout_s));
  }
  if (received != Received::kMessage) return nb::none();
  return to_bytes(message);
}

nb::list take(Channel& channel) {
  nb::list results;
  for (const std::string& result : channel.take()) results.append(to_bytes(result));
  return results;
}

}  // namespace

void bind_channel(nb::module_& m) {
  nb::class_<Channel>(m, "Channel",
                      "Steps on their way to the device thread, and results on their way back.")
      .def(nb::init<>())
      .def("submit", [](Channel& channel, const nb::bytes& step) { channel.submit(view(step)); },
           nb::arg("step"), "RuntimeError if too many are on their way, or it is closed.")
      .def("take", &take, "All results that have come, in the order submitted. Never waits.")
      .def_prop_ro("fd", &Channel::fd, "Readable once results have come since the last `take`.")
      .def("receive", &receive, nb::arg("timeout_s"),
           "The next step; None if none has come for so long, or it is closed.")
      .def("reply",
           [](Channel& channel, const nb::bytes& result) {
             channel.reply(std::string(view(result)));
           },
           nb::arg("result"), "The answer to the oldest step received.")
      .def("close", &Channel::close, "Nothing is received any more. Idempotent; any thread.")
      .def_prop_ro("closed", &Channel::is_closed);
}

}  // namespace streamkv
