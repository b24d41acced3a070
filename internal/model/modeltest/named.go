package modeltest

import "github.com/slicecast/slicecast/internal/model"

// NamedService returns a Service with nothing but a name.
func NamedService(name string) *model.Service {
	return model.NewService(model.Service{Namespace: "default", Name: name, Type: model.ClusterIP})
}

// NamedSlice returns a slice of a Service with the endpoints of WebSlice.
func NamedSlice(name, service string, endpoints int) *model.Slice {
	s := WebSlice(endpoints)
	s.Name, s.Service = name, service
	return model.NewSlice(s)
}

// ChangedWeb returns WebSlice with 100 endpoints, after changes.
func ChangedWeb(changes ...func(*model.Slice)) *model.Slice {
	s := WebSlice(100)
	for _, change := range changes {
		change(&s)
	}
	return model.NewSlice(s)
}

// Unready returns a change that makes the endpoint i unready.
func Unready(i int) func(*model.Slice) {
	return func(s *model.Slice) { s.Endpoints[i].Conditions.Ready = false }
}
