#include "client/dcpctl/output.h"

#include <fmt/core.h>
#include <google/protobuf/duration.pb.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

namespace dcp {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

Json MessageJson(const Message& message) {
  if (message.GetDescriptor() == google::protobuf::Duration::descriptor()) {
    const auto& d = static_cast<const google::protobuf::Duration&>(message);
    return static_cast<double>(d.seconds()) + d.nanos() * 1e-9;
  }
  return ToJson(message);
}

// A singular field, or element `i` of a repeated one.
Json Value(const Message& m, const FieldDescriptor* f, int i) {
  const Reflection& r = *m.GetReflection();
  const bool repeated = f->is_repeated();
  switch (f->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return repeated ? r.GetRepeatedInt32(m, f, i) : r.GetInt32(m, f);
    case FieldDescriptor::CPPTYPE_INT64:
      return repeated ? r.GetRepeatedInt64(m, f, i) : r.GetInt64(m, f);
    case FieldDescriptor::CPPTYPE_UINT32:
      return repeated ? r.GetRepeatedUInt32(m, f, i) : r.GetUInt32(m, f);
    case FieldDescriptor::CPPTYPE_UINT64:
      return repeated ? r.GetRepeatedUInt64(m, f, i) : r.GetUInt64(m, f);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return repeated ? r.GetRepeatedDouble(m, f, i) : r.GetDouble(m, f);
    case FieldDescriptor::CPPTYPE_FLOAT:
      return repeated ? r.GetRepeatedFloat(m, f, i) : r.GetFloat(m, f);
    case FieldDescriptor::CPPTYPE_BOOL:
      return repeated ? r.GetRepeatedBool(m, f, i) : r.GetBool(m, f);
    case FieldDescriptor::CPPTYPE_STRING:
      return repeated ? r.GetRepeatedString(m, f, i) : r.GetString(m, f);
    case FieldDescriptor::CPPTYPE_ENUM:
      return (repeated ? r.GetRepeatedEnum(m, f, i) : r.GetEnum(m, f))->name();
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return MessageJson(repeated ? r.GetRepeatedMessage(m, f, i) : r.GetMessage(m, f));
  }
  return nullptr;
}

void PrintFields(const Json& object, const std::string& prefix) {
  for (const auto& [key, value] : object.items()) {
    if (value.is_object()) {
      PrintFields(value, prefix + key + ".");
    } else {
      fmt::print("{:<34} {}\n", prefix + key,
                 value.is_string() ? value.get<std::string>() : value.dump());
    }
  }
}

int Fail(const Globals& globals, std::string_view code, const std::string& reason,
         const std::string& message, const std::string& line) {
  fmt::print(stderr, "dcpctl: {}\n", line);
  if (globals.json) {
    const Json error = {{"error", {{"code", code}, {"reason", reason}, {"message", message}}}};
    fmt::print("{}\n", error.dump(2));
  }
  return kExitFailed;
}

}  // namespace

Json ToJson(const Message& message) {
  Json object = Json::object();
  const Descriptor& descriptor = *message.GetDescriptor();
  for (int i = 0; i < descriptor.field_count(); ++i) {
    const FieldDescriptor* f = descriptor.field(i);
    if (f->type() == FieldDescriptor::TYPE_BYTES) continue;
    if (f->is_repeated()) {
      Json array = Json::array();
      for (int j = 0; j < message.GetReflection()->FieldSize(message, f); ++j) {
        array.push_back(Value(message, f, j));
      }
      object[f->name()] = std::move(array);
    } else if (!f->has_presence() || message.GetReflection()->HasField(message, f)) {
      object[f->name()] = Value(message, f, 0);
    }
  }
  return object;
}

void PrintFields(const Json& object) { PrintFields(object, ""); }

std::string Painted(Paint paint, std::string_view text) {
  static const bool kColour = isatty(STDOUT_FILENO) == 1 && std::getenv("NO_COLOR") == nullptr;
  if (!kColour) return std::string(text);
  const char* code = paint == Paint::kBold ? "1" : paint == Paint::kGood ? "32" : "31";
  return fmt::format("\x1b[{}m{}\x1b[0m", code, text);
}

int Fail(const Globals& globals, const RpcError& error) {
  return Fail(globals, GrpcCodeName(error.code), error.reason, error.message, error.ToString());
}

int Fail(const Globals& globals, const Status& status) {
  return Fail(globals, CodeName(status.code()), std::string(ReasonName(status.reason())),
              status.message(), status.ToString());
}

}  // namespace dcp
