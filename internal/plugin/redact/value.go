package redact

import (
	"regexp"
	"strings"
)

// maxValue bounds the length of a value that goes on until a quote or bracket, in bytes. A longer
// one ends with its line.
const maxValue = 64 << 10

// found is a value in a text, and what is put in its place. If it is empty, there is no value.
type found struct {
	begin, end int
	instead    string
}

// valueAfter returns the value after a name in s. It scans bytes before the value's end only, so
// that the time of leaving out all values is proportional to the length of s.
func valueAfter(s string, begin, end int) found {
	if at := valueField.FindStringSubmatchIndex(s[end:min(len(s), end+maxHeader)]); at != nil {
		// This name is itself a value, beside the field with the value of the secret.
		begin, end = end+at[2], end+at[3]
	}
	i := end
	for i < len(s) && s[i] == '\\' {
		i++
	}
	if i < len(s) && (s[i] == '"' || s[i] == '\'') {
		i++
	}
	i = blanks(s, i)
	separator := i
	for i < len(s) && i < separator+2 && strings.IndexByte(":=>", s[i]) >= 0 && s[separator] != '>' {
		// In YAML, a > after the colon and a blank begins a block. This one is part of =>.
		i++
	}
	yaml := i == separator+1 && s[separator] == ':'
	switch flag := s[begin] == '-'; {
	case i > separator:
	case begin > 0 && s[begin-1] == '<' && strings.HasPrefix(s[i:], ">"):
		next := strings.IndexByte(s[i:min(len(s), i+maxValue)], '<')
		if next < 0 {
			next = len(firstLine(s[i:]))
		}
		return found{i + 1, i + next, LeftOut}
	case strings.HasPrefix(s[i:], "%3D"), strings.HasPrefix(s[i:], "%3A"):
		i += len("%3D")
	case flag && separator > end && isBlank(s[separator-1]):
		// The next word is a flag's value, unless it is the next flag.
		if strings.HasPrefix(s[separator:], "--") {
			return found{}
		}
		i = separator
	case separator > end && isBlank(s[separator-1]):
		return randomAfter(s, end)
	default:
		return found{}
	}
	from := blanks(s, i)
	starts, quote := lineStart(s, begin)
	v := found{begin: from, instead: LeftOut}
	rest := s[from:]
	switch escaped := len(rest) - len(strings.TrimLeft(rest, `\`)); {
	case yaml && (starts && blockHeader.MatchString(rest[:min(len(rest), maxHeader)]) || blockAnywhere.MatchString(rest[:min(len(rest), maxHeader)])):
		return block(s, begin, end, from)
	case yaml && leftOutEscaped.MatchString(rest[:min(len(rest), maxHeader)]):
		v.end = from // as the string that this is in says without its escapes
	case yaml && blockEscaped.MatchString(rest[:min(len(rest), 8)]):
		v.end = from + quoted(rest, `"`, 0)
	case rest == "":
		v.end = from
	case rest[0] == '[' || rest[0] == '{':
		v.end = from + bracketed(rest)
	case rest[0] == '"' || rest[0] == '\'':
		v.end = from + 1 + quoted(rest[1:], rest[:1], 0)
		v.instead = rest[:1] + LeftOut
		if v.end < len(s) && s[v.end] == rest[0] {
			v.end++
			v.instead += rest[:1]
		}
	case escaped < len(rest) && escaped > 0 && (rest[escaped] == '"' || rest[escaped] == '\''):
		v.end = from + escaped + 1 + quoted(rest[escaped+1:], rest[escaped:escaped+1], escaped)
		v.instead = rest[:escaped+1] + LeftOut
	case strings.HasPrefix(rest, LeftOut):
		v.end = from + len(LeftOut)
	case yaml && starts && i < from:
		v.end = from + line(rest, quote)
		if quote == 0 && !harmlessValue.MatchString(s[from:v.end]) {
			v.end = continued(s, v.end, indentation(s, begin))
		}
	default:
		v.end = from + word(rest)
	}
	return v
}

// valueField matches what is between a name that is a value and the value that belongs to it, as in
// {"name": "PASSWORD", "value": "..."}.
var valueField = regexp.MustCompile(`^\\*["']?(?:,?[ \t]*\\*["']?|\r?\n[ \t]*|\\+n[ \t]*)(value)\\*["']?[ \t]*[:=]`)

// randomAfter returns the value after a name that ends at end, if it looks random. All that is
// between them are blanks, quotes, brackets and a separator, or the beginning of a block or list in
// YAML.
func randomAfter(s string, end int) found {
	m := beforeRandom.FindString(s[end:min(len(s), end+maxHeader)])
	if m == "" {
		return found{}
	}
	begin := end + len(m)
	stop := begin
	for stop < len(s) && (isEncoded(s[stop]) || s[stop] == '.' || s[stop] == '~') {
		stop++
	}
	if !looksRandom(s[begin:stop]) {
		return found{}
	}
	for stop < len(s) && s[stop] == '=' {
		stop++
	}
	return found{begin, moreEncoded(s, stop), LeftOut}
}

// beforeRandom matches what is between a name and a random value.
var beforeRandom = regexp.MustCompile(`^\\*["']?(?:[ \t]*(?:[:=]{1,2}|=>)|[ \t])[ \t]*(?:[|>][-+0-9]{0,2}[ \t]*)?(?:(?:\r?\n|\\n)[ \t]*(?:-[ \t])?)?\[?\\*["']?`)

// These match the beginning of a value in YAML that is in the following lines: of the first name in
// a line, of any name, and in a string of JSON.
var (
	blockHeader    = regexp.MustCompile(`^(?:[|>][-+0-9]{0,2}[ \t]{0,20}#|(?:[|>][-+0-9]{0,2})?[ \t]{0,20}\r?(?:\n|$))`)
	blockAnywhere  = regexp.MustCompile(`^[|>][-+0-9]{0,2}[ \t]{0,20}\r?(?:\n|$)`)
	leftOutEscaped = regexp.MustCompile(`^(?:[|>][-+0-9]{0,2}[ \t]*)?\\+[nr][ \t]*` + regexp.QuoteMeta(LeftOut))
	blockEscaped   = regexp.MustCompile(`^(?:[|>][-+0-9]{0,2}[ \t]*)?\\+[nr]`)
)

// maxHeader is more than these expressions look at.
const maxHeader = 64

func isBlank(c byte) bool { return c == ' ' || c == '\t' }

// blanks returns where the blanks end that begin at i.
func blanks(s string, i int) int {
	for i < len(s) && isBlank(s[i]) {
		i++
	}
	return i
}

// firstLine returns the first line of s without its end.
func firstLine(s string) string {
	if i := strings.IndexByte(s, '\n'); i >= 0 {
		s = s[:i]
	}
	return strings.TrimSuffix(s, "\r")
}

// quoted returns where the quote is that ends a string, which escaped backslashes are before. If
// there is none, it returns where the line ends.
func quoted(s, quote string, escaped int) int {
	backslashes, doubled := 0, false
	for i := range min(len(s), maxValue) {
		switch {
		case s[i] == '\\':
			backslashes++
			continue
		case s[i] != quote[0]:
		case escaped > 0 && backslashes <= escaped:
			return i - backslashes
		case escaped == 0 && quote == "'" && i+1 < len(s) && s[i+1] == '\'' && i > 0 && s[i-1] != '\'':
			doubled = true // in YAML, a quote within single quotes is doubled
			continue
		case escaped == 0 && doubled:
			doubled = false
		case escaped == 0 && (backslashes%2 == 0 || quote == "'"):
			return i
		}
		backslashes = 0
	}
	return len(firstLine(s))
}

// bracketed returns where the brackets end with which s begins. If they do not, it returns the end
// of the line in which a value is too long.
func bracketed(s string) int {
	depth, backslashes := 0, 0
	within, escaped := false, -1 // in a string; how many backslashes are before its quotes
	for i := range min(len(s), maxValue) {
		switch c := s[i]; {
		case c == '\\':
			backslashes++
			continue
		case c == '"' && (escaped < 0 || backslashes <= escaped):
			within, escaped = !within, max(escaped, backslashes)
		case within:
		case c == '[' || c == '{':
			depth++
		case c == ']' || c == '}':
			if depth--; depth == 0 {
				return i + 1
			}
		}
		backslashes = 0
	}
	i := min(len(s), maxValue)
	return i + len(firstLine(s[i:]))
}

// word returns where a word ends. A comma or semicolon within it may be a part of it.
func word(s string) int {
	for i := range len(s) {
		switch c := s[i]; {
		case isBlank(c), c == '\n', c == '\r', c == '\v', c == '\f', c == '"', c == '\'', c == '}', c == ']':
			return i
		case c == ',' || c == ';':
			if i+1 == len(s) || !isName(s[i+1]) || nextName.MatchString(s[i+1:min(len(s), i+1+maxName)]) {
				return i
			}
		}
	}
	return len(s)
}

// nextName matches the name of what follows a value.
var nextName = regexp.MustCompile(`^[\w.\-]+["']?[ \t]*[:=]`)

// line returns where the rest of a line ends, without a comma at its end. In a string of JSON,
// which has a quote before the name, the line ends there or with an escaped end of line.
func line(s string, quote byte) int {
	s = firstLine(s)
	if quote != 0 {
		if i := strings.IndexByte(s, quote); i >= 0 {
			s = s[:i]
		}
		if i := strings.Index(s, `\n`); i >= 0 {
			s = s[:i]
		}
		s = strings.TrimRight(s, `\`)
	}
	return len(strings.TrimSuffix(strings.TrimRight(s, " \t"), ","))
}

// lineStart reports whether a name at begin is the first word of a line. quote is the quote before
// it, if the line is in a string rather than the name.
func lineStart(s string, begin int) (starts bool, quote byte) {
	for i := begin - 1; i >= 0; i-- {
		switch c := s[i]; {
		case c == '\n':
			return true, quote
		case c == '"' || c == '\'':
			quote = c
		case c == '\\': // an escaped end of line, whose n is taken for a part of the name
			return true, '"'
		case !isBlank(c) && c != '-':
			return false, 0
		}
	}
	return true, quote
}

// indentation returns the column of a name, if only blanks and dashes are before it in its line.
// Otherwise it returns the number of blanks with which the line begins.
func indentation(s string, begin int) int {
	before := s[strings.LastIndexByte(s[:begin], '\n')+1 : begin]
	if strings.TrimLeft(before, " \t-\"'") == "" {
		return len(strings.TrimRight(before, "\"'"))
	}
	return len(before) - len(strings.TrimLeft(before, " \t"))
}

// continued returns where the lines end that follow i and are indented by more than so many blanks,
// or empty.
func continued(s string, i, more int) int {
	end := i
	for i < len(s) {
		next := i + strings.IndexByte(s[i:], '\n') + 1
		if next == i || next >= len(s) {
			return end
		}
		content := firstLine(s[next:])
		stop := next + len(content)
		if text := strings.TrimLeft(content, " \t"); text != "" {
			if len(content)-len(text) <= more {
				return end
			}
			end = stop
		}
		i = stop
	}
	return end
}

// object matches the value of a field that names an object, a file or a key.
const object = `["']?[\w./\-]{1,253}["']?`

// kept matches the fields of Kubernetes that are kept below names that secrets have. These names
// are in lower case here. The values of such fields name something. Below any other name, even the
// value of a field like key or path may be a secret.
var kept = map[string]*regexp.Regexp{
	"secret":              regexp.MustCompile(`^(?:(?:name|secretName): ` + object + `|optional: (?:true|false)|defaultMode: \d{1,5}|items:)$`),
	"serviceaccounttoken": regexp.MustCompile(`^(?:path: ` + object + `|audience: [\w./:\-]{1,253}|expirationSeconds: \d{1,9})$`),
	"imagepullsecrets":    regexp.MustCompile(`^name: ` + object + `$`),
	"secrets":             regexp.MustCompile(`^name: ` + object + `$`),
}

// keptItem matches the fields that are kept in the items of a secret.
var keptItem = regexp.MustCompile(`^(?:(?:key|path): ` + object + `|mode: \d{1,5})$`)

// block returns the value in the lines after the one at from, of the name in s[begin:end]. If that
// line has no mark of a block, the lines can have fields, of which some are kept: those directly
// below the name, and those directly below its items.
func block(s string, begin, end, from int) found {
	header := firstLine(s[from:])
	start, column := from+len(header), indentation(s, begin)
	var fields *regexp.Regexp // nil means that no field is kept
	stop := continued(s, start, column)
	if header == "" {
		fields = kept[lowered(s[begin:end])]
		stop = max(stop, items(s, start, column))
	}
	if stop == start {
		return found{}
	}
	direct, item := -1, -1 // the columns of direct fields and of those of items; -1 means none yet
	inItems := false
	keeps := func(column int, field string) bool {
		if direct < 0 {
			direct = column
		}
		switch {
		case fields == nil:
			return false
		case column == direct:
			inItems, item = field == "items:", -1
			return fields.MatchString(field)
		case item < 0:
			item = column
		}
		return inItems && column == item && keptItem.MatchString(field)
	}
	var out strings.Builder
	left := false // whether the last line that is not empty was left out
	for i, l := range strings.Split(s[start:stop], "\n") {
		field := strings.TrimLeft(l, " \t-")
		column := len(l) - len(field)
		switch field = strings.TrimSuffix(field, "\r"); {
		case i == 0:
			out.WriteString(header + l)
		case field == "":
			out.WriteString("\n" + l)
		case keeps(column, field):
			out.WriteString("\n" + l)
			left = false
		case !left:
			out.WriteString("\n" + l[:column] + LeftOut)
			left = true
		}
	}
	return found{from, stop, out.String()}
}

// items returns where the items of a list end, which follow i and are not indented by more than the
// name of the list.
func items(s string, i, column int) int {
	end := i
	for i < len(s) {
		next := i + strings.IndexByte(s[i:], '\n') + 1
		if next == i || next >= len(s) {
			return end
		}
		content := firstLine(s[next:])
		text := strings.TrimLeft(content, " \t")
		if len(content)-len(text) != column || !strings.HasPrefix(text, "- ") {
			return end
		}
		end = continued(s, next+len(content), column)
		i = end
	}
	return end
}
