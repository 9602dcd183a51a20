//! Taking a structure apart.

use proc_macro2::TokenStream;
use quote::quote;
use syn::{Attribute, Data, DeriveInput, Error, Field, Fields, FieldsNamed, GenericParam, Generics, Result};

use crate::names::Names;

/// Returns what the derive adds to the program.
pub(crate) fn expand(input: &DeriveInput) -> Result<TokenStream> {
    let names = Names::of(input)?;
    let (watched, others): (Vec<&Field>, Vec<&Field>) =
        fields(input)?.named.iter().partition(|field| is_watched(field));
    for attribute in watched.iter().flat_map(|field| &field.attrs).filter(|a| a.path().is_ident("watched")) {
        attribute.meta.require_path_only()?;
    }
    if watched.is_empty() {
        return Err(Error::new_spanned(
            &input.ident,
            "no field is #[watched], so that orbits would see nothing of it; mark those that tasks read",
        ));
    }

    let Names { object, watched: fields_name } = &names;
    let (name, visibility) = (&input.ident, &input.vis);
    let (for_impl, for_type, conditions) = input.generics.split_for_impl();
    let generics = &input.generics;
    let parameters = parameters(generics);
    let carried = |fields: &[&Field]| -> Vec<TokenStream> {
        let kept = |field: &&Field| {
            let attributes = field.attrs.iter().filter(|attribute| is_kept(attribute));
            let (visibility, name, kind) = (&field.vis, &field.ident, &field.ty);
            quote!(#(#attributes)* #visibility #name: #kind)
        };
        fields.iter().map(kept).collect()
    };
    let (watched_fields, other_fields) = (carried(&watched), carried(&others));
    let conditioned = |fields: &[&Field]| -> Vec<TokenStream> {
        let named = |field: &&Field| {
            let attributes = field.attrs.iter().filter(|attribute| attribute.path().is_ident("cfg"));
            let name = &field.ident;
            quote!(#(#attributes)* #name)
        };
        fields.iter().map(named).collect()
    };
    let (watched_names, other_names) = (conditioned(&watched), conditioned(&others));
    let about_fields = format!("The fields of [`{name}`] that orbits see. They lie in an area.");
    let about_object = format!(
        "A [`{name}`] whose watched fields ([`{fields_name}`]) lie in an area. They are used as if they were its own."
    );
    let about_pointer = "Where the watched fields are: what a task gets to know.";

    Ok(quote! {
        #[doc = #about_fields]
        #visibility struct #fields_name #generics #conditions {
            #(#watched_fields,)*
            #[doc(hidden)]
            __parameters: #parameters,
        }

        #[doc = #about_object]
        #visibility struct #object #generics #conditions {
            #(#other_fields,)*
            #[doc(hidden)]
            __watched: ::orrery_orbit::AreaBox<#fields_name #for_type>,
        }

        impl #for_impl #object #for_type #conditions {
            #[doc = #about_pointer]
            #[allow(dead_code)]
            #visibility fn watched(this: &Self) -> *const #fields_name #for_type {
                &raw const *this.__watched
            }
        }

        impl #for_impl ::core::ops::Deref for #object #for_type #conditions {
            type Target = #fields_name #for_type;

            fn deref(&self) -> &Self::Target {
                &self.__watched
            }
        }

        impl #for_impl ::core::ops::DerefMut for #object #for_type #conditions {
            fn deref_mut(&mut self) -> &mut Self::Target {
                &mut self.__watched
            }
        }

        impl #for_impl ::orrery_orbit::Delegate for #name #for_type #conditions {
            type Watched = #fields_name #for_type;
            type Object = #object #for_type;

            fn delegate(
                self,
                area: &::orrery_orbit::Area,
            ) -> ::core::result::Result<Self::Object, (::orrery_orbit::AreaError, Self)> {
                let place = match ::orrery_orbit::DelegateSlot::new(area) {
                    Ok(place) => place,
                    Err(error) => return Err((error, self)),
                };
                let Self { #(#watched_names,)* #(#other_names,)* } = self;
                let watched = #fields_name { #(#watched_names,)* __parameters: ::core::default::Default::default() };
                Ok(#object { #(#other_names,)* __watched: place.fill(watched) })
            }

            fn join(object: Self::Object) -> Self {
                let #object { #(#other_names,)* __watched } = object;
                let #fields_name { #(#watched_names,)* __parameters: _ } = ::orrery_orbit::AreaBox::into_inner(__watched);
                Self { #(#watched_names,)* #(#other_names,)* }
            }
        }
    })
}

fn fields(input: &DeriveInput) -> Result<&FieldsNamed> {
    let kind = match &input.data {
        Data::Struct(data) => match &data.fields {
            Fields::Named(fields) => return Ok(fields),
            Fields::Unnamed(_) => "a structure whose fields have no names",
            Fields::Unit => "a structure without fields",
        },
        Data::Enum(_) => "an enumeration",
        Data::Union(_) => "a union",
    };
    Err(Error::new_spanned(
        &input.ident,
        format!("{kind} cannot be split: only a structure with named fields can"),
    ))
}

fn is_watched(field: &Field) -> bool {
    field.attrs.iter().any(|attribute| attribute.path().is_ident("watched"))
}

/// Returns whether a field takes an attribute along. Those of other derives mean nothing on the generated structures.
fn is_kept(attribute: &Attribute) -> bool {
    ["doc", "cfg", "allow", "expect", "warn", "deprecated"].iter().any(|name| attribute.path().is_ident(name))
}

/// A type of no size that uses all parameters, as each structure must.
fn parameters(generics: &Generics) -> TokenStream {
    let used = generics.params.iter().filter_map(|parameter| match parameter {
        GenericParam::Lifetime(lifetime) => {
            let lifetime = &lifetime.lifetime;
            Some(quote!(::core::marker::PhantomData<&#lifetime ()>,))
        }
        GenericParam::Type(kind) => {
            let name = &kind.ident;
            Some(quote!(::core::marker::PhantomData<#name>,))
        }
        GenericParam::Const(_) => None,
    });
    quote!((#(#used)*))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;
    use syn::parse_quote;

    fn refused(input: &DeriveInput) -> String {
        expand(input).unwrap_err().to_string()
    }

    #[test]
    fn what_cannot_be_split_is_refused_by_name() {
        assert!(
            refused(&parse_quote!(
                enum E {
                    A,
                }
            ))
            .contains("an enumeration cannot be split")
        );
        assert!(refused(&parse_quote!(union U { #[watched] a: u8 })).contains("a union"));
        assert!(
            refused(&parse_quote!(
                struct S(#[watched] u8);
            ))
            .contains("no names")
        );
        assert!(
            refused(&parse_quote!(
                struct S;
            ))
            .contains("without fields")
        );
        assert!(
            refused(&parse_quote!(
                struct S {
                    a: u8,
                }
            ))
            .contains("no field is #[watched]")
        );
        assert!(
            refused(&parse_quote!(
                struct S {
                    #[watched(always)]
                    a: u8,
                }
            ))
            .contains("unexpected token")
        );
        let unknown = parse_quote!(
            #[delegate(colour = Red)]
            struct S {
                #[watched]
                a: u8,
            }
        );
        assert!(refused(&unknown).contains("object = Name"));
    }

    #[test]
    fn what_is_generated_has_the_names_asked_for() {
        let usual = expand(&parse_quote!(
            struct S {
                #[watched]
                a: u8,
                b: u8,
            }
        ))
        .unwrap()
        .to_string();
        assert!(usual.contains("struct DelegatedS") && usual.contains("struct SWatched"), "{usual}");
        let named = expand(&parse_quote!(
            #[delegate(object = O, watched = W)]
            struct S {
                #[watched]
                a: u8,
            }
        ));
        let named = named.unwrap().to_string();
        assert!(named.contains("struct O") && named.contains("struct W"), "{named}");
    }
}
