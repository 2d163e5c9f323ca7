package guard

import (
	"cmp"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/serviceplane/serviceplane/internal/guard/documents"
)

// TestRules: docs/RULES.md has one row for each rule code that the repository quotes,
// sorted by prefix and number, and a test or a scenario of proxiertest quotes each row.
func TestRules(t *testing.T) {
	t.Parallel()
	code := regexp.MustCompile(`\b(CFG|CLEAN|CT|EHC|ENG|EPS|HC|LCB|LTD|MET|NODE|NPA|OPT|PKT|RUN|SYS|TOP|TRK|VAL|W)-\d\d\d?\b`)
	var rows []string
	for _, m := range regexp.MustCompile(`(?m)^\| ([A-Z]+-\d+) \|`).FindAllStringSubmatch(documents.Read(t, root, "RULES.md")["docs/RULES.md"], -1) {
		rows = append(rows, m[1])
	}
	byNumber := func(a, b string) int {
		prefix, number, _ := strings.Cut(a, "-")
		other, than, _ := strings.Cut(b, "-")
		return cmp.Or(cmp.Compare(prefix, other), cmp.Compare(len(number), len(than)), cmp.Compare(number, than))
	}
	if !slices.Equal(rows, slices.Compact(slices.SortedFunc(slices.Values(rows), byNumber))) {
		t.Errorf("docs/RULES.md is not sorted, or has a code twice: %q", rows)
	}
	tested := map[string]bool{}
	for _, suffix := range []string{".go", ".md"} {
		for name, text := range documents.Read(t, root, suffix) {
			isTest := strings.HasSuffix(name, "_test.go") || strings.HasPrefix(name, "proxiertest/") && suffix == ".go"
			for _, quoted := range code.FindAllString(text, -1) {
				tested[quoted] = tested[quoted] || isTest
				if !slices.Contains(rows, quoted) {
					t.Errorf("%s quotes %s, which docs/RULES.md does not have", name, quoted)
				}
			}
		}
	}
	for _, row := range rows {
		if !tested[row] {
			t.Errorf("docs/RULES.md has %s, which no test quotes", row)
		}
	}
}
