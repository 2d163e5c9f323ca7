package nodeproxy

import (
	"errors"
	"hash/maphash"
	"strconv"
	"strings"
	"sync"
	"unicode/utf8"

	"go.uber.org/zap"
)

// badAnnotations logs what cannot be read of annotations, once for each value. Hooks meet a value
// once for each port of a Service, or each endpoint of a slice, and again with each change, and who
// may write an object may make it long.
type badAnnotations struct {
	log  *zap.Logger
	seed maphash.Seed

	mu   sync.Mutex
	said map[annotationOf]uint64 // the hash of the value that was logged
}

type annotationOf struct{ object, name string }

func newBadAnnotations(log *zap.Logger) *badAnnotations {
	return &badAnnotations{log: log, seed: maphash.MakeSeed(), said: map[annotationOf]uint64{}}
}

// maxSaid bounds the memory of what was logged. Nobody tells when an object is gone.
const maxSaid = 10_000

// ignore logs that the annotation of an object has no effect.
func (b *badAnnotations) ignore(object, name, value string, err error) {
	at, hash := annotationOf{object, name}, maphash.String(b.seed, value)
	b.mu.Lock()
	defer b.mu.Unlock()
	if said, ok := b.said[at]; ok && said == hash {
		return
	}
	if len(b.said) >= maxSaid {
		clear(b.said)
	}
	b.said[at] = hash
	b.log.Warn("annotation ignored", zap.String("object", object), zap.String("annotation", name), zap.String("value", readable(value)), zap.Error(short(err)))
}

// maxReadable is how many bytes of an annotation a line of the log has.
const maxReadable = 64

// readable is the beginning of a long text.
func readable(text string) string {
	if len(text) <= maxReadable {
		return strings.ToValidUTF8(text, "?")
	}
	end := maxReadable
	for end > maxReadable-utf8.UTFMax && !utf8.RuneStart(text[end]) {
		end--
	}
	return strings.ToValidUTF8(text[:end], "?") + "…"
}

// short is an error that does not repeat a long value.
func short(err error) error {
	if number := (*strconv.NumError)(nil); errors.As(err, &number) {
		return number.Err
	}
	if text := err.Error(); len(text) > 2*maxReadable {
		return errors.New(readable(text))
	}
	return err
}
