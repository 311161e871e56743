#include "report.h"

#include <cstdarg>
#include <cstdio>
#include <set>
#include <tuple>
#include <vector>

namespace emu {
namespace {
struct Finding {
  Severity severity;
  std::string rule, text;
  Site site, other;
  int line;
};
std::vector<Finding> findings;
std::set<std::tuple<std::string, Site, Site, std::string>> seen;
uintptr_t code_base;
constexpr size_t kMostFindings = 500;
}  // namespace

void report(Severity severity, const char* rule, Site site, Site other, const char* format, ...) {
  char text[768];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  // Two sites tell findings apart; without sites the text does.
  if (!seen.insert({rule, site, other, site ? "" : text}).second || findings.size() >= kMostFindings) return;
  findings.push_back({severity, rule, text, site, other, 0});
}

void report_line(Severity severity, const char* rule, int line, const std::string& text) {
  if (!seen.insert({rule, Site(line), 0, text}).second || findings.size() >= kMostFindings) return;
  findings.push_back({severity, rule, text, 0, 0, line});
}

void append_detail(const std::string& text) {
  if (!findings.empty()) findings.back().text += "\n    " + text;
}

void clear_findings() {
  findings.clear();
  seen.clear();
}

void set_code_base(uintptr_t base) { code_base = base; }
Site site_of(const void* return_address) { return Site(reinterpret_cast<uintptr_t>(return_address) - code_base); }

extern "C" {
int emu_num_findings() { return int(findings.size()); }
int emu_finding_is_error(int i) { return findings[i].severity == Severity::Error; }
const char* emu_finding_rule(int i) { return findings[i].rule.c_str(); }
const char* emu_finding_text(int i) { return findings[i].text.c_str(); }
unsigned emu_finding_site(int i, int which) { return which ? findings[i].other : findings[i].site; }
int emu_finding_line(int i) { return findings[i].line; }
}
}  // namespace emu
