// Arguments of ops: arrays whose type and shape are checked by hand, for errors that say what was
// expected; and one op at once, with the interpreter free.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <initializer_list>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>

#include "streamkv/bound_kernel.h"
#include "streamkv/formats.h"
#include "streamkv/team.h"

namespace streamkv {

namespace nb = nanobind;

using Array = nb::ndarray<nb::ro, nb::device::cpu>;

constexpr int64_t kAny = -1;  // in a shape: any length

// Elements as arrays have them: bfloat16 is uint16, which numpy knows.
struct Bf16Bits {
  uint16_t bits;
};

template <class T>
struct ElementType {
  static nb::dlpack::dtype code() { return nb::dtype<T>(); }
};

template <>
struct ElementType<Bf16Bits> {
  static nb::dlpack::dtype code() { return nb::dtype<uint16_t>(); }
};

inline std::string type_name(nb::dlpack::dtype dtype) {
  const auto code = static_cast<nb::dlpack::dtype_code>(dtype.code);
  const std::string bits = std::to_string(dtype.bits);
  if (code == nb::dlpack::dtype_code::Float) return "float" + bits;
  if (code == nb::dlpack::dtype_code::Int) return "int" + bits;
  if (code == nb::dlpack::dtype_code::UInt) return "uint" + bits;
  return "type " + std::to_string(dtype.code) + " of " + bits + " bits";
}

inline std::string join_shape(const int64_t* shape, size_t num_dims) {
  std::string text = "[";
  for (size_t i = 0; i < num_dims; ++i) {
    if (i > 0) text += ", ";
    text += shape[i] == kAny ? "any" : std::to_string(shape[i]);
  }
  return text + "]";
}

inline std::string describe(const Array& array) {
  return type_name(array.dtype()) + " " + join_shape(array.shape_ptr(), array.ndim());
}

[[noreturn]] inline void refuse(const char* op, const char* argument, const std::string& expected,
                                const std::string& got) {
  throw std::invalid_argument(std::string(op) + ": " + argument + ": expected " + expected +
                              ", got " + got);
}

inline bool is_contiguous(const Array& array) {
  int64_t stride = 1;
  if (array.size() == 0) return true;
  for (size_t i = array.ndim(); i-- > 0;) {
    if (array.shape(i) > 1 && array.stride(i) != stride) return false;
    stride *= static_cast<int64_t>(array.shape(i));
  }
  return true;
}

inline bool has_shape(const Array& array, std::initializer_list<int64_t> shape) {
  if (array.ndim() != shape.size()) return false;
  for (size_t i = 0; i < shape.size(); ++i)
    if (shape.begin()[i] != kAny && shape.begin()[i] != static_cast<int64_t>(array.shape(i)))
      return false;
  return true;
}

// The elements of a C-contiguous array of just this type and shape.
template <class T>
const T* elements(const char* op, const char* argument, const Array& array,
                  std::initializer_list<int64_t> shape) {
  const nb::dlpack::dtype expected = ElementType<T>::code();
  if (array.dtype() != expected || !has_shape(array, shape))
    refuse(op, argument, type_name(expected) + " " + join_shape(shape.begin(), shape.size()),
           describe(array));
  if (!is_contiguous(array)) refuse(op, argument, "a C-contiguous array", "a strided one");
  return static_cast<const T*>(static_cast<const void*>(array.data()));
}

// int32 [length], each in [0, limit).
inline const int32_t* indices(const char* op, const char* argument, const Array& array,
                              int64_t length, int64_t limit) {
  const int32_t* values = elements<int32_t>(op, argument, array, {length});
  for (size_t i = 0; i < array.shape(0); ++i)
    if (values[i] < 0 || values[i] >= limit)
      refuse(op, argument, "numbers from 0 to " + std::to_string(limit - 1),
             std::to_string(values[i]) + " at " + std::to_string(i));
  return values;
}

inline const char* dtype_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32: return "float32";
    case Dtype::kBFloat16: return "bfloat16";
    case Dtype::kFloat16: return "float16";
    default: return "int8";
  }
}

// Of float weights.
inline Dtype parse_dtype(const char* op, const char* argument, const std::string& name) {
  if (name == "float32") return Dtype::kFloat32;
  if (name == "bfloat16") return Dtype::kBFloat16;
  refuse(op, argument, "'float32' or 'bfloat16'", "'" + name + "'");
}

// Of what may also be whole numbers: inputs of products, and KV.
inline Dtype parse_any_dtype(const char* op, const char* argument, const std::string& name) {
  if (name == "float32") return Dtype::kFloat32;
  if (name == "bfloat16") return Dtype::kBFloat16;
  if (name == "int8") return Dtype::kInt8;
  refuse(op, argument, "'float32', 'bfloat16' or 'int8'", "'" + name + "'");
}

// [any, width] inputs of a product, as it takes them.
inline const void* inputs(const char* op, const Array& x, Dtype dtype, int64_t width) {
  if (dtype == Dtype::kFloat32) return elements<float>(op, "x", x, {kAny, width});
  if (dtype == Dtype::kBFloat16) return elements<Bf16Bits>(op, "x", x, {kAny, width});
  const uint8_t* groups = elements<uint8_t>(op, "x", x, {kAny, input_row_bytes(dtype, width)});
  if (reinterpret_cast<uintptr_t>(groups) % alignof(InputGroup) != 0)
    refuse(op, "x", "an array aligned to 4 bytes", "one that is not");
  return groups;
}

// Rows of floats [rows, depth] to pack or quantize, and their type.
inline Dtype check_rows(const char* op, const Array& source, int64_t depth) {
  const nb::dlpack::dtype dtype = source.dtype(), half{2, 16, 1};  // float, bits, lanes
  const bool is_float = dtype == nb::dtype<float>(), is_bf16 = dtype == nb::dtype<uint16_t>();
  if (!is_float && !is_bf16 && dtype != half)
    refuse(op, "source", "float32, float16 or uint16 (bfloat16 bits)", describe(source));
  if (!has_shape(source, {kAny, depth}) || !is_contiguous(source))
    refuse(op, "source",
           "C-contiguous [rows, " + (depth == kAny ? "depth" : std::to_string(depth)) + "]",
           describe(source) + (is_contiguous(source) ? "" : ", strided"));
  return is_float ? Dtype::kFloat32 : is_bf16 ? Dtype::kBFloat16 : Dtype::kFloat16;
}

// A new array: [rows, columns] of float32 or bfloat16 bits, or of int8 the bytes of InputGroups.
struct Output {
  nb::object array;
  void* data;
};

template <class T>
Output make_output_of(int64_t rows, int64_t columns) {
  constexpr int64_t kMaxElements = std::numeric_limits<int64_t>::max() / sizeof(T);
  if (columns > 0 && rows > kMaxElements / columns) throw std::bad_alloc();
  T* data = new T[rows * columns];
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  const size_t shape[2] = {static_cast<size_t>(rows), static_cast<size_t>(columns)};
  return {nb::cast(nb::ndarray<nb::numpy, T>(data, 2, shape, owner)), data};
}

inline Output make_output(Dtype dtype, int64_t rows, int64_t columns) {
  if (dtype == Dtype::kFloat32) return make_output_of<float>(rows, columns);
  if (dtype == Dtype::kBFloat16) return make_output_of<uint16_t>(rows, columns);
  return make_output_of<uint8_t>(rows, input_row_bytes(dtype, columns));
}

template <class Args>
void run_op(Team& team, const Kernel<Args>& kernel, const Args& args) {
  const nb::gil_scoped_release no_gil;
  BoundKernel<Args> bound{kernel, args};
  const Phase phase = bound.phase(team.num_threads());
  team.run(&phase, 1);
}

}  // namespace streamkv
