package debughttp

import (
	"cmp"
	"strings"

	"k8s.io/apimachinery/pkg/types"
)

// compareNames orders Services by namespace and name.
func compareNames(a, b types.NamespacedName) int {
	return cmp.Or(compareNatural(a.Namespace, b.Namespace), compareNatural(a.Name, b.Name))
}

// compareNatural orders texts by their bytes, and numbers in them by value: web-2 precedes web-10.
// Texts that differ only in leading zeros are ordered by their bytes.
func compareNatural(a, b string) int {
	first, second := a, b
	for a != "" && b != "" {
		n, m := digits(a), digits(b)
		if n > 0 && m > 0 {
			x, y := strings.TrimLeft(a[:n], "0"), strings.TrimLeft(b[:m], "0")
			if c := cmp.Or(cmp.Compare(len(x), len(y)), strings.Compare(x, y)); c != 0 {
				return c
			}
			a, b = a[n:], b[m:]
			continue
		}
		if a[0] != b[0] {
			return cmp.Compare(a[0], b[0])
		}
		a, b = a[1:], b[1:]
	}
	return cmp.Or(cmp.Compare(len(a), len(b)), strings.Compare(first, second))
}

// digits returns the length of the number that a text begins with.
func digits(text string) (n int) {
	for n < len(text) && '0' <= text[n] && text[n] <= '9' {
		n++
	}
	return n
}
