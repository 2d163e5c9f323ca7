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
	if a == b {
		return 0
	}
	return cmp.Or(compareValues(a, b), strings.Compare(a, b))
}

// compareValues returns 0 for texts that differ only in leading zeros.
func compareValues(a, b string) int {
	for {
		differ := commonPrefix(a, b)
		number := differ
		for number > 0 && isDigit(a[number-1]) {
			number--
		}
		n, m := digits(a[number:]), digits(b[number:])
		if n == 0 || m == 0 {
			return strings.Compare(a[differ:], b[differ:])
		}
		x, y := strings.TrimLeft(a[number:number+n], "0"), strings.TrimLeft(b[number:number+m], "0")
		if c := cmp.Or(cmp.Compare(len(x), len(y)), strings.Compare(x, y)); c != 0 {
			return c
		}
		a, b = a[number+n:], b[number+m:]
	}
}

func commonPrefix(a, b string) (n int) {
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}

// digits returns the length of the number that a text begins with.
func digits(text string) (n int) {
	for n < len(text) && isDigit(text[n]) {
		n++
	}
	return n
}

func isDigit(b byte) bool { return '0' <= b && b <= '9' }
