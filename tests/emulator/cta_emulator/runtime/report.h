// Findings: what a run has to say against the kernel. Sites are code offsets; the front end turns them into lines.
#pragma once
#include <cstdint>
#include <string>

namespace emu {
using Site = uint32_t;  // return address minus load address of the kernel library; 0: none

enum class Severity { Warning, Error };

// Adds a finding unless the same (rule, site, other) was reported already. Format as printf; %% for a percent sign.
void report(Severity severity, const char* rule, Site site, Site other, const char* format, ...)
    __attribute__((format(printf, 5, 6)));
void report_line(Severity severity, const char* rule, int line, const std::string& text);  // when the line is known
void append_detail(const std::string& text);  // adds a line below the last finding
void clear_findings();

void set_code_base(uintptr_t base);
Site site_of(const void* return_address);
}  // namespace emu

#define EMU_SITE emu::site_of(__builtin_return_address(0))
