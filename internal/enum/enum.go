// Package enum names the values of enumerations, also those that do not exist yet.
package enum

import "strconv"

// Name is the name of v among those of an enumeration, which begin with the zero
// value's. A value without one is "unknown_9", for instance, which is fit for people
// and for the label of a metric.
func Name[T ~uint8](v T, names ...string) string {
	if int(v) < len(names) {
		return names[v]
	}
	return "unknown_" + strconv.Itoa(int(v))
}
