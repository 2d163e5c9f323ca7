package p

import "example.com/made/internal/in"

const Limit = 2

var Loose struct{ A, B int }

type Engine interface {
	Apply() error
	Resync()
}

type Impl struct{}

func (Impl) Apply() error { return nil }

type Config struct {
	Name []byte
	Room int
}

type Outer struct {
	Config
	in.Hidden
}

type List[K comparable, V any] struct{ Items map[K]V }

func (l *List[K, V]) Add(k K, v *V) {}

type Feed chan string

type Kept struct{}

func (Kept) Extra()  {}
func (*Kept) Value() {}

func Open(name string, flags ...int) error { return nil }

var Swap = func() {}

type hidden struct{ Y int }

func Hidden() *hidden { return nil }

// Alias is an internal type for everybody.
type Alias = in.Base

// Own has no methods of Third.
type Own in.Third

type Fn int
type Fresh int
